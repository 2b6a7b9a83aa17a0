"""Check a checkpoint for entries that contradict each other even though every file is undamaged.

Reads metadata, and the parameter lists of an optimizer's groups. Each rule is a function from the facts to
inconsistencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ckptkit.checkpoints.checkpoint import UNREADABLE, Checkpoint
from ckptkit.checkpoints.examination.facts import Facts
from ckptkit.checkpoints.examination.inconsistency import Inconsistency
from ckptkit.checkpoints.examination.optimizers import (
    find_empty_groups,
    find_missing_state_kinds,
    find_other_step,
    find_train_mode_schedule_free,
    find_unknown_names,
    find_wrapper_prefix_mismatch,
    find_wrong_state_shapes,
    group_list_inconsistencies,
)
from ckptkit.checkpoints.examination.weights import (
    find_empty_weights,
    find_layer_gaps,
    find_misfit_biases,
    find_misfit_heads,
    find_misfit_routers,
    find_odd_layers,
)
from ckptkit.formats import is_main_file
from ckptkit.layout import Layout
from ckptkit.layout.renames import fold_numbers

Rule = Callable[[Facts], Iterator[Inconsistency]]

OF_WEIGHTS: tuple[Rule, ...] = (
    *(find_empty_weights, find_layer_gaps, find_misfit_routers),
    *(find_odd_layers, find_misfit_biases, find_misfit_heads),
)
OF_EXPORTS: tuple[Rule, ...] = (*OF_WEIGHTS, find_train_mode_schedule_free, find_other_step)
OF_STATES: tuple[Rule, ...] = (
    find_wrong_state_shapes,
    find_missing_state_kinds,
    find_wrapper_prefix_mismatch,
    find_unknown_names,
)
RULES: tuple[Rule, ...] = (*OF_EXPORTS, *OF_STATES, find_empty_groups, group_list_inconsistencies)


def examine_checkpoint(checkpoint: Checkpoint, rules: tuple[Rule, ...] = RULES) -> tuple[Inconsistency, ...]:
    """Return the inconsistencies of a checkpoint; () if its components cannot be read or joined.

    An optimizer may also train weights in a file beside the model, such as a `2_Dense` of sentence-transformers.
    """
    try:
        found = examine_layout(checkpoint.layout, rules)
    except UNREADABLE:  # the reader reports these errors in more detail
        return ()
    if not any(one.code == "state_size" for one in found):
        return found
    paths = {left.path for left in checkpoint.unread_files if is_main_file(left.path.name)}
    layouts = filter(None, map(checkpoint.find_layout_of_file, paths))
    beside = {shape for layout in layouts for shape in layout.shapes.values()}
    return tuple(one for one in found if one.code != "state_size" or tuple(one.data["found"]) not in beside)


def examine_layout(layout: Layout, rules: tuple[Rule, ...] = RULES) -> tuple[Inconsistency, ...]:
    """Return the inconsistencies of a layout; the same one in every layer counts once, as `layers.*.bias`."""
    facts = Facts.of(layout)
    by_pattern: dict[object, list[Inconsistency]] = {}
    for one in (found for rule in rules for found in rule(facts)):
        by_pattern.setdefault((one.code, one.tensor and fold_numbers(one.tensor), one.message), []).append(one)
    merged = []
    for same in by_pattern.values():
        first = same[0]
        tensor = fold_numbers(first.tensor) if first.tensor and len(same) > 1 else first.tensor
        names = tuple(name for one in same for name in one.names or (one.tensor,) if name)
        merged.append(replace(first, tensor=tensor, names=names))
    return tuple(merged)
