"""Use an optimizer's fp32 master weights in place of the weights, or compute them from its remainders.

Weights and master weights are renamed together, so every cut and join is applied to both.

Sources: `fp32_param` and `param` are Megatron's (megatron/core/optimizer/distrib_optimizer.py,
`sharded_param_state_fs_model_space` and `_fully_reshardable`), `master_param` is TransformerEngine's
(transformer_engine/pytorch/optimizers/fused_adam.py). With `store_param_remainders` its dtype is int16: the bits of a
float32 master that a bfloat16 weight lacks. The format `fully_reshardable` stores these integers as float32
(Megatron-LM#4222).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.models.names.translate_checkpoint import find_parameter_entry, format_state_kind
from ckptkit.models.names.weights import find_weights
from ckptkit.state.model import Model, RecipeFor, recipe_for_any_tensor
from ckptkit.state.options import MASTER, ConvertOptions
from ckptkit.state.selection import apply_dtypes
from ckptkit.words import count

_FLOAT32 = DTYPES["float32"]
_OPTION = f"--weights-from {MASTER}"
REMAINDERS, COMPLETED = DTYPES["int16"], DTYPES["bfloat16"]  # the optimizer's state, and the weight that it completes
_MASTER_STATES = ("fp32_param", "param", "master_param")
_LISTS = "fp32_groups"  # a list of masters for each parameter group, without the names of the parameters


def with_master_weights(checkpoint: Checkpoint, options: ConvertOptions) -> Checkpoint:
    """Return the checkpoint with the fp32 master weights beside the weights; unchanged if the weights are the masters.

    Raises `Mismatch` if there are no master weights, `Usage` for options that do not work with them.
    """
    part, weights = checkpoint.model_component, checkpoint.weights
    masters_found = find_masters(checkpoint.layout, weights.layout.specs)
    if not masters_found:
        floats = [spec for spec in weights.layout.specs.values() if spec.dtype.kind == "float"]
        narrow = sum(spec.numel for spec in floats if spec.dtype.itemsize < _FLOAT32.itemsize)
        if 2 * narrow > sum(spec.numel for spec in floats):  # most weights have 16 bits: they are not the masters
            message = "no optimizer in the checkpoint lists master weights by parameter name"
            how = "ckptkit convert SRC OUT --to dcp --optimizer-keys names"
            hint = f"drop {_OPTION}, or name the parameters first: {how}"
            raise Mismatch(message, path=weights.layout.path, hint=hint)
        return checkpoint
    if not options.writer.is_model_only:
        hint = f"run `ckptkit consolidate SRC OUT {_OPTION}` instead"
        raise Usage(f"{_OPTION} needs an output that is a model without an optimizer", hint=hint)
    if options.weights or options.merge or options.quantize or options.salvage or options.from_base:
        hint = f"run `ckptkit consolidate SRC OUT {_OPTION}` first, then convert OUT"
        raise Usage(f"{_OPTION} does not work with `average`, --merge, --quantize, --salvage or --from-base", hint=hint)
    tensors = {weights.came_from[name]: checkpoint.layout.tensors[entry] for name, entry in masters_found.items()}
    masters = replace(
        part.layout_relative_to_checkpoint, tensors={**part.layout_relative_to_checkpoint.tensors, **tensors}, twins={}
    )
    with_own = replace(part, masters=masters)
    parts = (with_own if component is part else component for component in checkpoint.components)
    return replace(checkpoint, components=tuple(parts))


def join_masters(model: Model, masters: Model) -> Model:
    """Return a model whose weights will come from another model with the same names, made of the master weights.

    Raises `Unsupported` if only a part of a weight has master weights.
    """
    names = replaced_weights(model.layout, masters.layout)
    dtypes = {name: stored_dtype_of(masters.layout, name) for name in names}
    remainders = [name for name, dtype in dtypes.items() if dtype == REMAINDERS]
    stored = {name: f"masters in {dtype}" for name, dtype in dtypes.items()}
    stored |= {name: f"{stored_dtype_of(model.layout, name)} and remainders in {REMAINDERS}" for name in remainders}
    layout = edits.cast_tensors(model.layout, lambda name, spec: _FLOAT32 if name in stored else spec.dtype)
    without = [name for name, spec in layout.specs.items() if spec.dtype.kind == "float" and name not in stored]
    taken = f"{count(len(names), 'weight')} taken from masters"
    notes = [f"{taken}, {len(remainders)} of them from remainders in {REMAINDERS}"]
    notes += [f"no master: {count(len(without), 'weight')}, such as `{without[0]}`"] if without else []
    return replace(model.with_layout(layout), siblings=(masters.layout,), stored_as=stored).with_remarks(*notes)


def add_master_recipes(model: Model) -> Model:
    """Add a recipe for each weight that has master weights."""
    from ckptkit.engine.recipes import Master, Remainder  # imports numpy, which plain copies do not need

    (masters,) = model.siblings
    number = len(model.others) + 1
    recipes: dict[str, RecipeFor] = {}
    for name in replaced_weights(model.layout, masters):
        if stored_dtype_of(masters, name) == REMAINDERS:
            recipes[name] = recipe_for_any_tensor(Remainder(name, number))
        else:
            recipes[name] = recipe_for_any_tensor(Master(name, number, stored_dtype_of(model.layout, name)))
    others = (*model.others, edits.select_entries(masters, recipes.__contains__))
    return replace(model, others=others, recipes={**model.recipes, **recipes})


def with_note_on_remainders(model: Model) -> Model:
    """Add a note if the optimizer has remainders of the weights that are not used."""
    layout = model.part.layout
    uncovered = master_remainder_entries(layout, find_weights(layout).layout.specs)
    if not uncovered:
        return model
    which = f"{count(len(uncovered), 'weight')} in {REMAINDERS}, such as `{uncovered[0]}`"
    return model.with_remarks(f"the optimizer has remainders of the masters of {which}; {_OPTION} adds them")


def refuse_cast_with_remainders(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Raise `Unsupported` for a cast of bfloat16 weights that remainders in the optimizer complete to fp32."""
    found = find_weights(checkpoint.layout)
    weights, tensors = found.layout, checkpoint.layout.tensors
    kept = {
        parameter: name
        for name, parameter in master_entries_and_weights(checkpoint.layout, weights.specs)
        if tensors[name].spec.dtype == REMAINDERS and options.edits.is_selected(name)
    }
    made_of = {new: (old,) for new, old in found.came_from.items()}
    rules = options.edits.dtype_rules(tensors)
    _, casts = apply_dtypes(edits.select_entries(weights, kept.__contains__), rules, made_of, lambda _: True)
    if casts:
        parameter = next(iter(casts))
        message = f"--dtype would cast `{parameter}`, which the optimizer completes by remainders in {REMAINDERS}"
        hint = f"leave --dtype out, or write the model alone: ckptkit consolidate SRC OUT {_OPTION}"
        raise Unsupported(message, path=checkpoint.path, tensor=kept[parameter], hint=hint)


def replaced_weights(layout: Layout, masters: Layout) -> list[str]:
    """Return the weights whose data comes from another place in the second layout."""
    return [name for name, tensor in layout.tensors.items() if masters.tensors[name].chunks != tensor.chunks]


def stored_dtype_of(layout: Layout, name: str) -> DType:
    """Return the dtype in which a tensor is stored. Raises `Unsupported` if its chunks have several."""
    stored = sorted({chunk.dtype.name for chunk in layout.tensors[name].chunks if not chunk.is_zeros})
    if len(stored) > 1:
        message = f"the weight is stored in {' and '.join(stored)}: only a part of it has a master"
        raise Unsupported(message, path=layout.path, tensor=name, hint=f"drop {_OPTION}")
    return DTYPES[stored[0]] if stored else layout.tensors[name].spec.dtype


def find_masters(layout: Layout, weights: Mapping[str, Spec]) -> dict[str, str]:
    """Return the entry with the master of each weight that has one: weight name -> entry name.

    Raises `Mismatch` for a master whose shape differs from its weight's, or whose dtype no master has.
    """
    masters = {}
    for name, parameter in master_entries_and_weights(layout, weights):
        spec, weight = layout.tensors[name].spec, weights[parameter]
        fits = spec.dtype.is_castable_to(_FLOAT32) or (spec.dtype, weight.dtype) == (REMAINDERS, COMPLETED)
        if spec.shape != weight.shape or not fits:
            expected = f"expected an fp32 master for the weight `{parameter}` ({weight})"
            hint = "check that the model and the optimizer come from the same save"
            raise Mismatch(f"{expected}, found {spec}", path=layout.path, tensor=name, hint=hint)
        masters[parameter] = name
    return masters


def master_entries_and_weights(layout: Layout, weights: Mapping[str, Spec]) -> Iterator[tuple[str, str]]:
    """Yield (entry, weight) of each state that is named like a master weight."""
    own = set(weights)
    for name in layout.tensors:
        with suppress(Unsupported):  # an optimizer with indices instead of names
            located = find_parameter_entry(layout.key(name), own)
            if located and format_state_kind(located[0]).rpartition(".")[2] in _MASTER_STATES:
                yield name, located[1]


def unnamed_masters_in(layout: Layout) -> list[str]:
    """Return the master weights of optimizers that do not name their parameters."""
    return [name for name in layout.tensors if _LISTS in layout.key(name)]


def master_remainder_entries(layout: Layout, weights: Mapping[str, Spec]) -> list[str]:
    """Return the entries with the low bits that complete the weights to their masters."""
    return [
        name for name, _ in master_entries_and_weights(layout, weights) if layout.tensors[name].spec.dtype == REMAINDERS
    ]
