"""Turn quantized weights into plain ones where a dtype is asked for, and refuse what would tear them from their scales.

Weights are known by the names that their numbers have in the checkpoint, whatever they are called in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.checkpoints.part import Part
from ckptkit.conversion.selection import Edits
from ckptkit.errors import Unsupported, Usage
from ckptkit.layout import Layout, Spec, StoredTensor, edits
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.models.companions import Companions, find_config
from ckptkit.models.fit import abridge
from ckptkit.names.weights import LeftOut, Weights
from ckptkit.quantized.config import read_said, without_quantization
from ckptkit.quantized.find import BLOCKS, Packed, Quantized, find_quantized, is_plain
from ckptkit.tensors.dtypes import DTYPES, DType

_MOST_AT_HAND = 1 << 28  # bytes of one expert, where a block needs all of it


@dataclass(frozen=True, slots=True)
class Dequantizing:
    """The quantized weights of a checkpoint, and the names in it of those that are to become plain ones of a dtype."""

    quantized: Quantized
    chosen: frozenset[str]
    dtype: DType = DTYPES["float32"]

    def unpack(self, found: Weights) -> Weights:
        """Return the weights of a checkpoint with plain ones for the quantized, of which no bytes are known yet."""
        names = {new: plain_name(new) if old in self.chosen else new for new, old in found.came_from.items()}
        kept = [new for new, old in found.came_from.items() if old in self.chosen or old not in self.quantized.members]
        tensors = {names[new]: self._plain(found.layout, new, found.came_from[new]) for new in kept}
        layout = replace(found.layout, tensors=tensors, keys={})
        came_from = {names[new]: found.came_from[new] for new in kept}
        gone = [tensor.spec.nbytes for new, tensor in found.layout.tensors.items() if new not in kept]
        return replace(
            found,
            layout=layout,
            came_from=came_from,
            left_out=(*found.left_out, LeftOut("scales", len(gone), sum(gone))),
        )

    def _plain(self, layout: Layout, new: str, old: str) -> StoredTensor:
        if old not in self.chosen:
            return layout.tensors[new]
        return StoredTensor(Spec(self.dtype, self.quantized.weights[old].shape), ())

    def recipes(self, layout: Layout, came_from: Mapping[str, str], source: int = 1) -> dict[str, Recipe]:
        """Return the recipe of each plain weight of a layout. Its operands are of the source of this number."""
        made = {new: came_from[new] for new in layout.tensors if came_from.get(new) in self.chosen}
        if len(set(made.values())) < len(self.chosen):
            lost = min(self.chosen - set(made.values()))
            raise Unsupported("it would be lost: the result has no such tensor", path=layout.root, tensor=lost)
        return {new: recipe_of(self.quantized, old, source) for new, old in made.items()}

    def casts(self, layout: Layout, came_from: Mapping[str, str]) -> dict[str, str]:
        """Return what became of the dtypes of the weights, by their names in the result."""
        specs = self.quantized.layout.specs
        return {
            new: f"{specs[came_from[new]].dtype} times scales => {tensor.spec.dtype}"
            for new, tensor in layout.tensors.items()
            if came_from.get(new) in self.chosen
        }

    @property
    def source(self) -> Layout:
        """Return the source of the operands: numbers and scales as they are stored."""
        return replace(edits.select(self.quantized.layout, self.quantized.members.__contains__), blobs={}, twins={})

    def of_plain(self, companions: Companions, notes: list[str]) -> Companions:
        """Return companions of a model with plain weights, and add to `notes` what there is to say."""
        count, config = len(self.chosen), companions.config
        notes.append(f"dequantized {count} weights ({self.quantized.method})")
        if config is None or (plain := without_quantization(config)) == config:
            return companions
        notes[-1] += "; config.json says no more that they are quantized"
        return replace(companions, config=plain)


def without_false_words(companions: Companions, layout: Layout, notes: list[str]) -> Companions:
    """Return companions whose config.json does not say of plain weights that they are quantized, and add to `notes`.

    A training that began with a quantized model has plain ones, which loaders would take for what it was.
    """
    said = read_said(companions.config).method
    if companions.config is None or said is None or not is_plain(layout.specs):
        return companions
    notes.append(f"config.json said that the weights are quantized ({said}), which they are not; it says so no more")
    return replace(companions, config=without_quantization(companions.config))


def make_all_plain(
    quantized: Quantized | None, found: Weights, config: Mapping[str, Any] | None
) -> Dequantizing | None:
    """Return the quantized weights of a model, to become plain ones of the model's dtype; None if it has none.

    Raises `Unsupported` if they are of a kind that cannot be computed.
    """
    chosen = frozenset(old for old in found.came_from.values() if quantized and old in quantized.weights)
    if quantized is None or not (chosen or quantized.refusal):
        return None
    if quantized.refusal is not None:
        hint = "dequantize them first, with the library that made them"
        raise Unsupported(quantized.refusal, path=quantized.layout.root, tensor=min(quantized.members), hint=hint)
    return Dequantizing(quantized, chosen, dtype_of(config or {}))


def dtype_of(config: Mapping[str, Any]) -> DType:
    """Return the dtype that a config.json says its model has, bfloat16 if it says none of 16 bits or more."""
    said = DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))))
    return said if said is not None and said.kind == "float" else DTYPES["bfloat16"]


def plain_name(name: str) -> str:
    """Return what a weight is called when its numbers are not packed any more."""
    return name.removesuffix(BLOCKS)


def look_for_quantized(part: Part) -> Quantized | None:
    """Return the quantized weights in a part of a checkpoint; None without any."""
    return find_quantized(part.layout, find_config(part.path))


def refuse_mean(parts: Sequence[Part]) -> None:
    """Raise `Unsupported` if any of the checkpoints that a mean is to be of is quantized."""
    for part in parts:
        quantized = look_for_quantized(part)
        if quantized is not None:
            message = f"the weights are quantized ({quantized.method}): their numbers have no mean without their scales"
            hint = "dequantize each first: ckptkit consolidate SRC OUT --dtype bf16"
            raise Unsupported(message, path=part.path, hint=hint)


def find_dequantizing(quantized: Quantized | None, found: Weights, asked: Edits) -> Dequantizing | None:
    """Return the quantized weights that a dtype is asked for; None if it is for none.

    Raises `Unsupported` if they are of a kind that cannot be computed, `Usage` if it is asked for some alone.
    """
    if quantized is None or not asked.dtype:
        return None
    if asked.dtype_of_weights is not None:
        quantized.require_known()
    names = {old: plain_name(new) for new, old in found.came_from.items() if old in quantized.weights}
    chosen = {old for old, new in names.items() if asked.wanted_dtype(new, is_weight=True) is not None}
    if not chosen:
        return None
    if left := sorted(names[old] for old in names.keys() - chosen):
        hint = "give one dtype for all weights, like --dtype bf16"
        raise Usage(f"{len(left)} quantized weights would stay, such as `{left[0]}`, and others not", hint=hint)
    return Dequantizing(quantized, frozenset(chosen))


def check_together(part: Part, found: Weights, asked: Edits) -> None:
    """Raise `Usage` if quantized weights would be written without their scales, or under names that these do not have.

    Where nothing is selected or renamed they stay together.
    """
    quantized = look_for_quantized(part) if asked.include or asked.exclude or asked.rename else None
    names = {old: new for new, old in found.came_from.items()}
    for name, packed in quantized.weights.items() if quantized else ():
        new, scale = names.get(name), names.get(packed.scale)
        stem = plain_name(name)
        if scale != (None if new is None else plain_name(new) + packed.scale.removeprefix(stem)):
            message = f"{name} would become {new or 'nothing'}, and its scales {packed.scale} {scale or 'nothing'}"
            hint = "select and rename both alike, or add --dtype bf16, which makes plain weights of them"
            raise Usage(message, path=part.path, hint=hint)


def say_small(layout: Layout, asked: Edits) -> list[str]:
    """Return words on weights of 8 bits that stay what they are though a dtype is asked for: they have no scales."""
    small = sorted(name for name, spec in layout.specs.items() if spec.dtype.kind == "small_float")
    if asked.dtype_of_weights is None or not small:
        return []
    weights = "1 weight" if len(small) == 1 else f"{len(small)} weights"
    return [f"{weights} of 8 bits stayed so, since nothing is known of scales: {abridge(small)}"]


def check_casts(quantized: Quantized | None, casts: Mapping[str, str], came_from: Mapping[str, str]) -> None:
    """Raise `Unsupported` or `Usage` if scales or packed numbers would be rounded by themselves."""
    if quantized is None:
        return
    torn = sorted(new for new in casts if came_from.get(new, new) in quantized.members)
    if torn:
        quantized.require_known()
        hint = "ckptkit consolidate SRC OUT --dtype bf16 dequantizes the model; do that first, or leave --dtype out"
        raise Usage(
            f"{abridge(torn)} belong to quantized weights ({quantized.method}): they mean nothing rounded", hint=hint
        )


def recipe_of(quantized: Quantized, name: str, source: int = 1) -> Recipe:
    """Return the recipe of a weight, by the name of its numbers in the checkpoint, the source of this number."""
    from ckptkit.quantized.plain_blocks import Transposed4, scaled  # imports numpy, which no copy needs

    packed, specs = quantized.weights[name], quantized.layout.specs
    numbers = Operand(source, name, specs[name].dtype)
    scales = Operand(source, packed.scale, specs[packed.scale].dtype)
    if packed.steps is not None:
        return scaled(numbers, scales, specs[packed.scale].shape, packed.steps)
    require_modest(quantized, name, packed)
    return Transposed4(numbers, scales, packed.shape)


def require_modest(quantized: Quantized, name: str, packed: Packed) -> None:
    """Raise `Unsupported` for experts of which one would not be held in memory."""
    _, columns, rows = packed.shape
    if columns * rows // 2 > _MOST_AT_HAND:
        message = f"one expert of {list(packed.shape)} would take {columns * rows // 2} bytes of memory"
        raise Unsupported(message, path=quantized.layout.root, tensor=name)
