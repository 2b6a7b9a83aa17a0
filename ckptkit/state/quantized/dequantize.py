"""Dequantize weights if the user requests a dtype, and refuse changes that separate weights from their scales.

Weights are identified by the names of their numbers in the checkpoint, not by names in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.checkpoints.component import Component
from ckptkit.errors import Caution, Mismatch, Unsupported, Usage
from ckptkit.layout import Spec, StoredTensor, edits
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.models.companions import find_model_config
from ckptkit.models.fit import join_few_names
from ckptkit.models.names.weights import Weights
from ckptkit.state.model import Model, recipe_for_any_tensor
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.config import is_declared_quantized, read_quantization_config, without_quantization
from ckptkit.state.quantized.find import Quantized, find_quantized, has_no_quantized_tensor
from ckptkit.state.quantized.packed import dequantized_name, have_matching_new_names
from ckptkit.state.selection import Edits, find_wanted_dtype
from ckptkit.words import count

_BY_LIBRARY = "dequantize them first, with the library that made them"


def dequantize_if_asked(model: Model, options: ConvertOptions) -> Model:
    """Dequantize the quantized weights if the user requests a dtype; otherwise keep them with their scales, or refuse.

    Raises `Unsupported` for an average of quantized weights, and for a second quantization.
    """
    asked = options.edits
    has_silent_config = model.companions.config is not None and not is_declared_quantized(model.config)
    is_concerned = options.weights or options.quantize or asked.dtype or asked.changes_names or has_silent_config
    quantized = find_quantized_in(model.part, model.config) if is_concerned else None
    if options.weights and quantized is not None:
        message = f"the weights are quantized ({quantized.method}): ckptkit cannot average them without their scales"
        hint = "dequantize each first: ckptkit consolidate SRC OUT --dtype bf16"
        raise Unsupported(message, path=model.part.path, hint=hint)
    if options.quantize:
        if quantized is not None:
            message = f"the weights are quantized already ({quantized.method})"
            ours = "dequantize them first: ckptkit consolidate SRC OUT --dtype bf16"
            hint = "dequantize them with the library that quantized them" if quantized.refusal else ours
            raise Unsupported(message, path=model.part.path, hint=hint)
        if model.companions.config is None:
            hint = "pass --base MODEL, the model that the training began with"
            raise Usage("no config.json found, which tells loaders how the weights are quantized", hint=hint)
        model = model.with_config(without_quantization(model.config))
    chosen = weights_to_dequantize(quantized, model.weights, asked)
    if quantized is None or not chosen:
        require_scales_with_weights(quantized, model, asked)
        if quantized is not None and has_silent_config:
            message = f"config.json does not say that the weights are quantized ({quantized.method})"
            message += ": loaders would take the stored numbers as they are"
            if quantized.refusal is not None:  # ckptkit cannot dequantize these, and does not know what to declare
                return model.with_remarks(Caution(message))
            hint = "pass --dtype bf16 to dequantize them, or --base MODEL with `quantization_config` in its config.json"
            raise Mismatch(message, path=model.part.path, hint=hint)
        return without_false_quantization(model)
    return dequantize_chosen(model, quantized, chosen)


def find_quantized_in(component: Component, base: Mapping[str, Any] | None = None) -> Quantized | None:
    """Return a component's quantized weights; None without any. The `base` config counts if none is beside them."""
    return find_quantized(component.layout, find_model_config(component.path) or base)


def without_false_quantization(model: Model) -> Model:
    """Return a model whose config.json does not declare plain weights as quantized.

    After training from a quantized model, the weights are plain but config.json may be unchanged.
    """
    stated = read_quantization_config(model.companions.config).method
    if stated is None or not has_no_quantized_tensor(model.part.layout.specs):
        return model
    words = f"config.json said that the weights are quantized ({stated}), but they are plain"
    return model.with_config(without_quantization(model.config)).with_remarks(f"{words}: removed that from config.json")


def weights_to_dequantize(quantized: Quantized | None, weights: Weights, edits: Edits) -> frozenset[str]:
    """Return the quantized weights for which the user requests a dtype, by their names in the checkpoint.

    Raises `Unsupported` if ckptkit cannot compute them, `Usage` if the request matches only some of them.
    """
    if quantized is None or not edits.dtype:
        return frozenset()
    if edits.dtype_of_weights is not None:
        quantized.require_supported()
    names = {old: dequantized_name(new) for new, old in weights.came_from.items() if old in quantized.weights}
    rules = edits.dtype_rules(weights.came_from.values())
    chosen = {old for old, new in names.items() if find_wanted_dtype(rules, new, (old,)) is not None}
    if chosen and (missed := sorted(names[old] for old in names.keys() - chosen)):
        which = f"not {count(len(missed), 'weight')} such as `{missed[0]}`"
        hint = "pass one dtype for all weights, like --dtype bf16"
        raise Usage(f"--dtype matches only some quantized weights: {which}", hint=hint)
    return frozenset(chosen)


def dequantize_all(model: Model) -> Model:
    """Return a model with plain weights in config.json's dtype. Raises `Unsupported` if ckptkit cannot compute them."""
    quantized = find_quantized_in(model.part, model.config)
    chosen = frozenset(old for old in model.weights.came_from.values() if quantized and old in quantized.weights)
    if quantized is None or not (chosen or quantized.refusal):
        return without_false_quantization(model)
    if quantized.refusal is not None:
        root, tensor = quantized.layout.root, min(quantized.members)
        raise Unsupported(quantized.refusal, path=root, tensor=tensor, hint=_BY_LIBRARY)
    dtype = dtype_in_config(model.config)
    plain = dequantize_chosen(model, quantized, chosen, dtype)
    return plain.with_remarks(f"dequantized weights become {dtype} unless you pass --dtype")


def dtype_in_config(config: Mapping[str, Any]) -> DType:
    """Return the model's dtype from config.json; bfloat16 if it does not name a float dtype of 16 bits or more."""
    stated = DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))))
    return stated if stated is not None and stated.kind == "float" else DTYPES["bfloat16"]


def dequantize_chosen(
    model: Model, quantized: Quantized, chosen: frozenset[str], dtype: DType = DTYPES["float32"]
) -> Model:
    """Return a model with a recipe for each chosen weight. Its numbers and scales become a further source."""
    number = len(model.others) + 1
    source = edits.select_entries(quantized.layout, quantized.members.__contains__)
    tensors: dict[str, StoredTensor] = {}
    came_from: dict[str, str] = {}
    for new, old in model.weights.came_from.items():
        if old in chosen:  # without bytes until the recipe computes them
            plain = dequantized_name(new)
            tensors[plain], came_from[plain] = StoredTensor(Spec(dtype, quantized.weights[old].shape), ()), old
        elif old not in quantized.members:
            tensors[new], came_from[new] = model.layout.tensors[new], old
    weights = replace(model.weights, layout=replace(model.layout, tensors=tensors, keys={}), came_from=came_from)
    dequantized = {new: old for new, old in came_from.items() if old in chosen}
    recipes = {
        new: recipe_for_any_tensor(dequantizing_recipe_of(quantized, old, number)) for new, old in dequantized.items()
    }
    stored_as = {new: f"{quantized.layout.tensors[old].spec.dtype} times scales" for new, old in dequantized.items()}
    note = f"dequantized {count(len(chosen), 'weight')} ({quantized.method})"
    if (config := without_quantization(model.config)) != model.config:
        model = model.with_config(config)
        note += "; removed the quantization from config.json"
    others = (*model.others, replace(source, blobs={}, twins={}))
    return replace(model, weights=weights, others=others, recipes=recipes, stored_as=stored_as).with_remarks(note)


def require_scales_with_weights(quantized: Quantized | None, model: Model, asked: Edits) -> None:
    """Raise `Usage` if quantized weights would be written without their scales, or under names that do not match.

    Without a selection or a rename they stay together.
    """
    if quantized is None or not asked.changes_names:
        return
    names = {old: new for new, old in model.weights.came_from.items()}
    for name, packed in quantized.weights.items():
        olds = (name, *packed.beside)
        news = [names.get(old) for old in olds]
        if not have_matching_new_names(olds, news):
            new, *rest = (one or "nothing" for one in news)
            message = f"`{name}` would become `{new}`, but its scales `{packed.beside[0]}` would become `{rest[0]}`"
            hint = "select and rename both alike, or dequantize them with --dtype bf16"
            raise Usage(message, path=model.part.path, hint=hint)


def check_quantized_casts(model: Model, options: ConvertOptions) -> Model:
    """Refuse casts that separate quantized weights from their scales, and add a note on unchanged 8-bit weights.

    Raises `Unsupported` or `Usage` if scales or packed numbers would be rounded on their own.
    """
    if model.stored_as:  # the quantized weights were dequantized
        return model
    refuse_separate_rounding(model.part, model.weights.origins_by_name(model.casts))
    small = sorted(name for name, spec in model.layout.specs.items() if spec.dtype.kind == "small_float")
    if options.edits.dtype_of_weights is None or not small:
        return model
    weights = count(len(small), "weight")
    return model.with_remarks(
        f"{weights} of 8 bits stayed as they are, because no scales are known: {join_few_names(small)}"
    )


def refuse_separate_rounding(component: Component, rounded: Mapping[str, frozenset[str]]) -> None:
    """Raise `Unsupported` or `Usage` if scales or packed numbers would be rounded on their own.

    `rounded` gives, for each tensor to round, the tensors of the component that it is made of.
    """
    quantized = find_quantized_in(component) if rounded else None
    if quantized is None:
        return
    separated = sorted(new for new, olds in rounded.items() if not quantized.members.isdisjoint(olds))
    if separated:
        quantized.require_supported()
        names = join_few_names(separated)
        message = f"{names} belong to quantized weights ({quantized.method}): rounding would destroy them"
        hint = "ckptkit consolidate SRC OUT --dtype bf16 dequantizes the model; do that first, or drop --dtype"
        raise Usage(message, hint=hint)


def dequantizing_recipe_of(quantized: Quantized, name: str, source_index: int = 1) -> Recipe:
    """Return the recipe of a weight, by the name of its numbers in the checkpoint, which is number `source_index`."""
    packed, tensors = quantized.weights[name], quantized.layout.tensors
    return packed.make([Operand(source_index, one, tensors[one].spec.dtype) for one in (name, *packed.beside)])
