"""Compare rounded master weights with the weights, for masters in a trainer's format or in an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from ckptkit.checkpoints.problems import Problems
from ckptkit.engine.compare import compare_computed, compare_layouts
from ckptkit.errors import Corrupt, Mismatch, SeveralModels
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.edits import cast_tensors
from ckptkit.models.names.weights import find_weights
from ckptkit.state.master_weights import COMPLETED, REMAINDERS, find_masters
from ckptkit.words import count

_NARROW = ("bfloat16", "float16")
_LISTED = 8  # problems that are reported separately


def compare_masters(layout: Layout, problems: Problems, jobs: int | None) -> Iterator[str]:
    """Add a problem for each weight that differs from its rounded master; yield notes."""
    weights, entries = weights_and_master_entries(layout, problems)
    specs = {name: weights[name].spec.dtype for name in entries}
    masters = {name: layout.tensors[entry] for name, entry in entries.items()}
    remainders = [name for name, master in masters.items() if master.spec.dtype == REMAINDERS]
    if remainders:
        which = f"{count(len(remainders), 'weight')}, such as `{remainders[0]}`"
        yield f"the optimizer has only {REMAINDERS} remainders of the masters of {which}: they were not compared"
    narrow = [name for name, dtype in specs.items() if dtype.name in _NARROW and name not in remainders]
    if narrow:
        copies = {name: weights[name] for name in narrow}
        both = replace(layout, tensors={name: masters[name] for name in narrow}, twins=copies, blobs={}, keys={})
        yield from compare_low_precision_copies(both, problems, jobs, entries)


def weights_and_master_entries(layout: Layout, problems: Problems) -> tuple[Mapping[str, StoredTensor], dict[str, str]]:
    """Return the weights, and the optimizer entries of their masters. Adds a problem for a master that does not fit."""
    with suppress(SeveralModels):
        try:
            weights = find_weights(layout).layout
        except Mismatch:  # an optimizer without a model
            return {}, {}
        try:
            return weights.tensors, find_masters(layout, weights.specs)
        except Mismatch as error:
            problems.add(error)
    return {}, {}


def compare_low_precision_copies(
    layout: Layout, problems: Problems, jobs: int | None, entries: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Compare rounded tensors with their 16-bit copies; yield notes on equal tensors and on remainders.

    `entries` maps the tensors to their names in the checkpoint, if these differ.
    """
    copied = {name: layout.tensors[name] for name in layout.twins if name in layout.tensors}
    tensors = replace(layout, tensors=copied, blobs={}, twins={})
    copies = replace(tensors, tensors={name: layout.twins[name] for name in copied})
    rounded = cast_tensors(tensors, lambda name, _: copies.tensors[name].spec.dtype)
    compared = compare_layouts(locate_all_chunks(rounded), locate_all_chunks(copies), jobs=jobs)
    remainders = [name for name in compared.differing_names if entries and is_master_remainder(layout, name, jobs)]
    different = [name for name in compared.differing_names if name not in remainders]
    if remainders:
        which = f"{count(len(remainders), 'master')}, such as `{(entries or {})[remainders[0]]}`"
        add = "`consolidate --weights-from master` adds them to the bf16 weights"
        yield f"only {REMAINDERS} remainders, saved as floats: {which}; {add}"
    for name in different[:_LISTED]:
        twin, distance = layout.twins[name], compared.distances[name]
        by = f", by up to {distance.max_abs:.3g}" if distance.max_abs else ""
        others = f"; {count(len(different), 'tensor', 'differs')} in all" if len(different) > 1 else ""
        message = (
            f"{distance.different} of {twin.spec.numel} elements differ from the copy in {twin.spec.dtype}{by}{others}"
        )
        path = layout.root / twin.chunks[0].path if twin.chunks else layout.root
        entry, hint = (entries or {}).get(name, name), "check that all files are from one save"
        problems.add(Corrupt(message, path=path, tensor=entry, hint=hint))
    same = len(layout.twins) - len(compared.differing_names)
    if same and not different:
        yield f"{count(same, 'tensor')} equal their rounded copies"


def is_master_remainder(layout: Layout, name: str, jobs: int | None) -> bool:
    """Return whether a tensor contains only the remainders of masters that its copy lacks, saved as floats."""
    from ckptkit.engine.recipes import FLOAT32, Master, Taken
    from ckptkit.layout.plan import Operand

    copy: StoredTensor = layout.twins[name]
    if copy.spec.dtype != COMPLETED:
        return False
    alone = replace(layout, tensors={name: layout.tensors[name]}, twins={}, blobs={}, keys={})
    weights = replace(alone, tensors={name: copy})
    spec = replace(copy.spec, dtype=FLOAT32)
    sides = {name: ((Taken(Operand(0, name, FLOAT32)), spec), (Master(name, 1, COMPLETED), spec))}
    try:
        compare_computed(locate_all_chunks(weights), locate_all_chunks(alone), sides, jobs=jobs)
    except Mismatch:
        return False
    return True
