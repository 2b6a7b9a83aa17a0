"""Find names that a model does not have: prefixes of wrappers, other families' names, missing and extra tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.parameter_order import is_buffer
from ckptkit.errors import Mismatch, names_and_more
from ckptkit.layout.renames import find_few_globs, group_by_change, numbers_to_wildcards, rules_for_renames
from ckptkit.layout.wrappers import WRAPPERS
from ckptkit.models.architectures import HEAD
from ckptkit.models.expected import closest_form
from ckptkit.models.fit import join_few_names
from ckptkit.models.mtp_layers import mtp_tensor_names
from ckptkit.models.names import HUB
from ckptkit.models.names.weights import find_model_key
from ckptkit.models.trained_class import is_task_head_name, with_trained_class
from ckptkit.models.vocabulary import find_vocabulary_size, vocabulary_rows_by_name
from ckptkit.plugins.doctor.exports import find_experts_numbered_last
from ckptkit.plugins.doctor.finding import (
    Finding,
    Value,
    consolidate_fix,
    has_loadable_weight_files,
    rewrite_fix,
    same_format_fix,
)
from ckptkit.plugins.doctor.load_target import KeyMismatch, LoadTarget, Shapes, TargetModel
from ckptkit.plugins.doctor.shapes import differing_shapes, layer_numbers, most_shapes_differ
from ckptkit.words import count


def findings_on_renames(
    checkpoint: Checkpoint, pairs: Mapping[str, str], rules: Sequence[str] | None, whose: str, base: str | None = None
) -> Iterator[Finding]:
    """Yield a finding for each kind of rename in `pairs`, which maps old names to new names.

    `whose` is the model or checkpoint that uses the new names. `rules` rename all names in `pairs`; None if too many
    rules would be needed.
    """
    fix = rewrite_fix(checkpoint, rename=tuple(rules), base=base) if rules else None
    for line, members in group_by_change(pairs):
        yield Finding("renamed", line.old, f"{whose} uses the name `{line.new}`", fix, members)


_IN_MEMORY = "transformers"  # family of transformers' in-memory names
_MAX_GLOBS = 8
_MAX_LAYERS = 8


def find_wrapper_prefixes(target: LoadTarget) -> Iterator[Finding]:
    """Yield the prefixes of wrappers in names, if the model to load does not have these wrappers."""
    if target.weights is None or not (target.asked or has_loadable_weight_files(target.checkpoint)):
        return
    raw = names_without_wrappers(target)
    for wrapper in WRAPPERS:
        prefix, whose = wrapper.text.rstrip("."), wrapper.whose
        names = tuple(name for name, own in raw.items() if prefix in name.split(".") and prefix not in own.split("."))
        if names:
            message = (
                f"the names start with `{prefix}.` (added by {whose}); a model without that wrapper will not find them"
            )
            if has_loadable_weight_files(target.checkpoint):  # an export drops the prefixes of wrappers
                fix = consolidate_fix(target.checkpoint, base=target.base)
            else:
                fix = rewrite_fix(target.checkpoint, rename=(rf"(^|\.){re.escape(prefix)}\.=>\1",))
            yield Finding("wrapper", names[0], message, fix, names)


def names_without_wrappers(target: LoadTarget) -> dict[str, str]:
    """Return the name without wrapper prefixes, by the name in the checkpoint below the model's key."""
    weights = target.weights
    if weights is None:
        return {}
    prefix = find_model_key(weights.whole)
    keys = {own: weights.whole.key(name) for own, name in weights.came_from.items()}
    return {".".join(map(str, key[len(prefix) :])): own for own, key in keys.items()}


def find_name_mismatches(target: LoadTarget) -> Iterator[Finding]:
    """Yield missing and unexpected tensors, with the rule, family or prefix that fixes them, if there is one."""
    model, misfits = target.model, target.key_mismatch
    if model is None or misfits is None or most_shapes_differ(target, differing_shapes(target)):
        return
    if not misfits:
        yield from find_names_of_other_form(target, model)
        return
    # if nothing is missing, another family of names cannot be the reason
    on_hub = translate_to_hub(target, model) if misfits.missing else None
    shapes = target.shapes
    if on_hub is not None:
        if not model.asked:
            return  # the trainer that wrote these names can load them
        shapes, finding = on_hub
        yield finding
        misfits = KeyMismatch.of(shapes, closest_form(model.forms, shapes.keys()), model)
    # each explanation removes its tensors from the mismatch, so the order matters: family, experts, rules
    experts = find_experts_numbered_last(target, model, misfits)
    if experts is not None:
        misfits, finding = experts
        yield finding
    pairs = misfits.renames_of_extra()
    if pairs:
        rules = rules_for_renames(pairs, target.shapes.keys())
        yield from findings_on_renames(target.checkpoint, pairs, rules, model.name, target.base)
    missing = {name: shape for name, shape in misfits.missing.items() if name not in pairs.values()}
    extra = [name for name in misfits.extra if name not in pairs]
    if missing and len(missing) == misfits.needed:
        wanted, found = count(len(missing), "tensor"), join_few_names(sorted(target.shapes, key=len))
        message = f"expected the {wanted} of {model.name}, found none of them under any name; found {found}"
        yield Finding("other_model", None, message)
        return
    yield from find_missing_tensors(missing, [pairs.get(name, name) for name in shapes], extra, model.name)
    if model.asked or has_loadable_weight_files(target.checkpoint):
        heads = mtp_tensor_names(extra, model.config)
        yield from find_unexpected_tensors(target, model, [name for name in extra if name not in heads])
        return
    # the trainer may have added other tensors, but not layers
    described = set(map(numbers_to_wildcards, target.best_matching_form.shapes if target.best_matching_form else ()))
    if layers := tuple(name for name in extra if numbers_to_wildcards(name) in described):
        message = f"{model.name} has fewer layers: `load_state_dict` refuses this tensor, other loaders skip it"
        yield Finding("unexpected", layers[0], message, names=layers)


def find_missing_tensors(
    missing: Shapes, present: Sequence[str], extra: Sequence[str], model: str
) -> Iterator[Finding]:
    """Yield the missing tensors: those of layers without any tensor as one finding, and each of the others.

    `extra` are those of the `present` tensors that the model does not have.
    """
    layers = layer_numbers(missing) - layer_numbers(present)
    of_layers = [name for name in missing if layer_numbers([name]) & layers]
    if of_layers:
        total = len(layer_numbers({*missing, *present} - {*extra}))
        numbers = names_and_more(list(map(str, sorted(layers))), _MAX_LAYERS)
        message = f"expected {total} layers as in {model}, found {total - len(layers)}"
        yield Finding("layers", None, f"{message}; missing: {numbers} ({count(len(of_layers), 'tensor')})")
    for name in missing:
        if name not in of_layers:
            cause = "; if the head was tied to the embedding in training, set tie_word_embeddings to true in its config"
            yield Finding("missing", name, f"missing: {model} has this tensor{cause if name == HEAD else ''}")


def translate_to_hub(target: LoadTarget, model: TargetModel) -> tuple[Shapes, Finding] | None:
    """Return the tensors' shapes by their names on the Hub, and the finding that suggests the translation.

    Returns None if the names are not another family's, or ckptkit cannot translate them.
    """
    shapes = target.shapes_on_hub(None)
    rows = find_vocabulary_size(model.config)
    options: dict[str, Value] = {}
    if shapes is None and rows is not None:
        shapes = target.shapes_on_hub(rows)
        options = {"vocab_size": rows}
    if shapes is None or shapes.keys() == target.shapes.keys() or target.weights is None:
        return None
    family = target.checkpoint.family
    whose = family.possessive if family else "the model's names in memory"
    names = tuple(name for name in target.shapes if name not in shapes)
    message = f"the names are {whose}, and {model.name} uses the Hub's"
    if options:
        padded = max(vocabulary_rows_by_name(target.weights.layout.tensors).values(), default=0)
        message += f"; the vocabulary is padded to {padded} rows, its own is {rows}"
    has_optimizer = target.layout.blobs or target.weights.left_out
    if has_loadable_weight_files(target.checkpoint) or not has_optimizer:
        fix = consolidate_fix(target.checkpoint, **options, base=model.name)
    else:
        fix = same_format_fix(target.checkpoint, names=HUB, **options, base=model.name)
    return shapes, Finding("family", names[0] if names else None, message, fix, names)


def find_names_of_other_form(target: LoadTarget, model: TargetModel) -> Iterator[Finding]:
    """Yield a finding if a family has the Hub's names but stores some tensors transposed.

    Yield another if shards have the names of files, but the model in memory has others (transformers 5).
    """
    if not model.asked:
        return
    family = target.checkpoint.family
    shapes, hub_shapes = target.shapes, target.hub_shapes if family else {}
    names = tuple(name for name, shape in shapes.items() if hub_shapes.get(name, shape) != shape)
    if family and names:
        here, there = list(shapes[names[0]]), list(hub_shapes[names[0]])
        message = f"{family.name} stores this tensor as {here}, and {model.name} as {there}"
        yield Finding("family", names[0], message, consolidate_fix(target.checkpoint, base=model.name), names)
    on_hub = target.best_matching_form.shapes if target.best_matching_form else {}
    names = tuple(name for name in target.weight_shapes if name in on_hub and name not in model.forms[-1].shapes)
    if names and not has_loadable_weight_files(target.checkpoint):
        words = f"torch's load expects the name that {model.name} has in memory"
        fix = same_format_fix(target.checkpoint, names=_IN_MEMORY, base=model.name)
        yield Finding("family", names[0], f"this is the tensor's name in files of the Hub; {words}", fix, names)


def find_unexpected_tensors(target: LoadTarget, model: TargetModel, extra: list[str]) -> Iterator[Finding]:
    """Yield the tensors that a model does not have. Never suggests to drop a tensor that may have been trained."""
    assert target.weights is not None
    message = f"{model.name} does not have this tensor: `load_state_dict` refuses it, other loaders skip it"
    head = None  # the class that has the head in the checkpoint, if the model's own class has another
    if any(map(is_task_head_name, extra)) and target.best_matching_form is not None and model.config:
        with suppress(Mismatch):
            config, _ = with_trained_class(target.weight_shapes, model.config, target.best_matching_form)
            head = str(config["architectures"][0]) if config is not model.config else None
    fix = consolidate_fix(target.checkpoint, base=model.name) if head else None
    for name in extra:
        if may_be_trained(target, name):
            whose = f"; it belongs to the head of {head}" if head and is_task_head_name(name) else ""
            yield Finding("unexpected", name, message + whose, fix if whose else None)
    extra = [name for name in extra if not may_be_trained(target, name)]
    came_from = target.weights.came_from
    names = {came_from.get(name, name) for name in extra}
    others = set(target.checkpoint.model_component.layout.names) - names
    globs = find_few_globs(sorted(names), others, _MAX_GLOBS)
    fix = rewrite_fix(target.checkpoint, exclude=globs, base=model.name) if globs else None
    yield from (Finding("unexpected", name, message, fix) for name in extra)


def may_be_trained(target: LoadTarget, name: str) -> bool:
    """Return whether a tensor may have been trained: its dtype is a float and its name is not that of a buffer."""
    spec = target.weights.layout.specs.get(name) if target.weights else None
    return spec is None or (spec.dtype.kind == "float" and not is_buffer(name))
