"""Copy tensors that only the base has into the model to write, such as MTP heads or a vision tower."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckptkit.checkpoints.base_weights import BaseWeights
from ckptkit.engine.recipes import Taken
from ckptkit.errors import Usage
from ckptkit.formats import locate, unpack
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.plan import Operand
from ckptkit.models.fit import abridge
from ckptkit.state.against_base import is_quantized
from ckptkit.state.model import Model, RecipeFor, always
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.find import Quantized, find_quantized
from ckptkit.state.quantized.packed import plain_name
from ckptkit.state.quantized.plain import dtype_of, recipe_of
from ckptkit.words import count, format_bytes

Added = dict[str, tuple[Spec, RecipeFor]]  # new tensors of the output, by name


def copy_from_base(model: Model, options: ConvertOptions) -> Model:
    """Add the tensors of the base that match `--from-base` and that the checkpoint does not have.

    The base becomes a further source. Quantized weights are copied with their scales if config.json declares the model
    as quantized; otherwise ckptkit computes plain weights. Raises `Usage` for a glob that matches nothing, or only
    tensors that the checkpoint has.
    """
    assert options.base is not None
    base = BaseWeights(options.base).open()
    layout = locate(unpack(base.weights.layout))
    chosen = choose_from_base(layout, model.layout.tensors.keys(), options)
    quantized = find_quantized(layout, base.companions.config)
    if quantized is not None and quantized.members.isdisjoint(chosen):
        quantized = None
    chosen = with_quantized_groups(chosen, quantized)
    stored_as: dict[str, str] = {}
    if quantized is None or is_quantized(model):
        added = copied_tensors(chosen, layout, model)
    else:
        added, stored_as = dequantized_tensors(chosen, quantized, layout, model)
    tensors = {**model.layout.tensors, **{name: StoredTensor(spec, ()) for name, (spec, _) in added.items()}}
    nbytes = format_bytes(sum(spec.nbytes for spec, _ in added.values()))
    return replace(
        model.with_layout(replace(model.layout, tensors=tensors)),
        base=base,
        others=(*model.others, replace(layout, blobs={}, twins={}, keys={})),
        recipes={**model.recipes, **{name: recipe for name, (_, recipe) in added.items()}},
        stored_as={**model.stored_as, **stored_as},
    ).say(f"copied {count(len(added), 'tensor')} ({nbytes}) from {options.base}: {abridge([*added])}")


def copied_tensors(chosen: Sequence[str], layout: Layout, model: Model) -> Added:
    """Return the chosen tensors of a base, to be copied unchanged."""
    return {name: (layout.tensors[name].spec, copy_recipe(name, source_number(model))) for name in chosen}


def dequantized_tensors(
    chosen: Sequence[str], quantized: Quantized, layout: Layout, model: Model
) -> tuple[Added, dict[str, str]]:
    """Return the chosen tensors of a base, with plain weights for quantized ones, and the stored form of the latter."""
    quantized.require_known()
    packed = {plain_name(name): name for name in chosen if name in quantized.weights}
    plain = [name for name in chosen if name not in quantized.members]
    added = copied_tensors(plain, layout, model)
    added |= {new: dequantized_spec(quantized, old, model) for new, old in packed.items()}
    return added, {new: f"{layout.tensors[old].spec.dtype} times scales" for new, old in packed.items()}


def source_number(model: Model) -> int:
    """Return the index that the base gets among the model's sources."""
    return len(model.others) + 1


def choose_from_base(layout: Layout, ours: Collection[str], options: ConvertOptions) -> list[str]:
    """Return the tensors of a base that match a glob and that the checkpoint does not have."""
    names = list(layout.tensors)
    options.edits.check_matched("--from-base", options.from_base, names, layout.root)
    chosen = []
    for glob in options.from_base:
        matching = [name for name in names if fnmatchcase(name, glob)]
        absent = [name for name in matching if plain_name(name) not in ours and name not in ours]
        if matching and not absent:
            hint = "drop --from-base: it copies tensors that only the base has"
            message = f"--from-base '{glob}' matches only tensors that the checkpoint has: {abridge(matching)}"
            raise Usage(message, path=layout.path, hint=hint)
        chosen += absent
    return list(dict.fromkeys(chosen))


def with_quantized_groups(chosen: Sequence[str], quantized: Quantized | None) -> list[str]:
    """Return the chosen tensors, with all tensors of each quantized weight.

    Numbers are useless without their scales.
    """
    groups = [(weight, *packed.beside) for weight, packed in quantized.weights.items()] if quantized else []
    group_of = {name: group for group in groups for name in group}
    return list(dict.fromkeys(one for name in chosen for one in group_of.get(name, (name,))))


def copy_recipe(name: str, number: int) -> RecipeFor:
    """Return the recipe that copies a tensor of the source with this index, cast to the dtype to write."""
    return lambda _, dtype: Taken(Operand(number, name, dtype))


def dequantized_spec(quantized: Quantized, name: str, model: Model) -> tuple[Spec, RecipeFor]:
    """Return the spec of a plain weight, and the recipe that computes it from the base's numbers and scales."""
    recipe = always(recipe_of(quantized, name, source_number(model)))
    return Spec(dtype_of(model.config), quantized.weights[name].shape), recipe
