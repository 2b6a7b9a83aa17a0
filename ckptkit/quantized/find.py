"""Find the quantized weights of a checkpoint, and the scales that go with each.

`X.weight` of 8 bits goes with `X.weight_scale_inv` (DeepSeek's, which multiplies in spite of its name) or
`X.weight_scale` (compressed-tensors); parameters of experts have an axis for them in front. MXFP4 of gpt-oss is
`X_blocks`, uint8 `[E, R, G, 16]` with 32 numbers in 16 bytes, and `X_scales`, `[E, R, G]`, for a weight
`[E, G*32, R]`.
Sources: transformers/integrations/finegrained_fp8.py and mxfp4.py, and compressed_tensors/quantization/lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Layout, Spec
from ckptkit.quantized.config import Block, Said, read_said
from ckptkit.quantized.foreign import find_foreign
from ckptkit.quantized.signs import OF_WEIGHTS, may_be_packed, may_be_quantized
from ckptkit.tensors.box import Shape

BLOCKS = "_blocks"
_SCALES, _PACK = "_scales", 16  # bytes that have one scale
_SUFFIXES = ("_scale_inv", "_scale")
_BESIDE = (".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized weight: the tensor of its `scale`, and its `shape`, which each scale has boxes of size `steps` of.

    MXFP4 has no `steps`: each scale is of 32 neighbours, and the stored tensor is transposed.
    """

    scale: str
    shape: Shape
    steps: Shape | None


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantized weights of a checkpoint by the names of the tensors that hold their numbers.

    `members` are all tensors that mean nothing without others: numbers, scales, and what else lies beside them.
    `refusal` says why the weights cannot be computed, where they cannot.
    """

    layout: Layout
    method: str
    weights: Mapping[str, Packed] = field(default_factory=dict)
    members: frozenset[str] = frozenset()
    refusal: str | None = None

    @property
    def parameters(self) -> int:
        return sum(prod(packed.shape) for packed in self.weights.values())

    def require_known(self) -> None:
        """Raise `Unsupported` for weights that cannot be computed."""
        if self.refusal is not None:
            hint = "leave --dtype out to have them as they are, or dequantize with the library that made them"
            raise Unsupported(self.refusal, path=self.layout.root, tensor=min(self.members), hint=hint)


def find_quantized(layout: Layout, config: Mapping[str, Any] | None) -> Quantized | None:
    """Return the quantized weights in a checkpoint, by any names; None without any.

    Raises `Mismatch` for scales that are missing or do not fit, `Corrupt` for a config that cannot be so.
    """
    specs = layout.specs
    if not may_be_quantized(specs):
        return None
    orphans = [name for name in specs if name.endswith(OF_WEIGHTS)]  # if they are: of no weight that is quantized
    foreign = find_foreign(specs)
    if foreign is not None:
        method, members = foreign
        return Quantized(layout, method, members=members, refusal=f"the weights are quantized by {method}")
    small = [name for name, spec in specs.items() if is_eight_bits(spec)]
    blocks = [name for name, spec in specs.items() if name.endswith(BLOCKS) and spec.dtype.name == "uint8"]
    scaled = {name: scale for name in small if (scale := scale_of(name, specs))}
    packed = {name: f"{name.removesuffix(BLOCKS)}{_SCALES}" for name in blocks}
    packed = {name: scale for name, scale in packed.items() if scale in specs}
    said = read_said(config)
    if not said.is_known:
        return None if is_plain(specs) else unknown(layout, said)
    if not (scaled or packed or ((small or blocks or orphans) and said.method)):
        return None
    scales = {*scaled.values(), *packed.values()}
    check_partners(layout, {name for name in (*small, *blocks) if name not in scales}, {**scaled, **packed}, scales)
    weights = {name: eight_bits(layout, name, scale, said.blocks) for name, scale in scaled.items()}
    weights |= {name: four_bits(layout, name, scale) for name, scale in packed.items()}
    beside = {name for name in specs if name.endswith(_BESIDE)}
    method = " and ".join(["fp8"] * bool(scaled) + ["mxfp4"] * bool(packed))
    return Quantized(layout, method, weights, frozenset({*weights, *scales, *beside}))


def is_plain(specs: Mapping[str, Spec]) -> bool:
    """Return whether there is nothing quantized among tensors, whatever a config says: neither numbers nor scales."""
    has_packed = any(may_be_packed(spec) and len(spec.shape) > 1 for spec in specs.values())
    return not (has_packed or find_foreign(specs) or any(name.endswith(OF_WEIGHTS) for name in specs))


def is_eight_bits(spec: Spec) -> bool:
    """Return whether a tensor is of floats of 8 bits that can be weights: those without a mantissa are scales."""
    return spec.dtype.kind == "small_float" and not spec.dtype.name.endswith(("_x2", "e8m0fnu"))


def scale_of(name: str, specs: Mapping[str, Spec]) -> str | None:
    """Return the tensor with the scales of another; None without any."""
    return next((name + suffix for suffix in _SUFFIXES if name + suffix in specs), None)


def unknown(layout: Layout, said: Said) -> Quantized:
    """Return weights that config.json says are quantized in some way not known here: any tensor may belong to them."""
    names = frozenset(layout.tensors)
    refusal = f"config.json says that the weights are quantized by `{said.method}`, which is not known here"
    return Quantized(layout, str(said.method), members=names, refusal=refusal)


def check_partners(layout: Layout, numbers: set[str], scaled: Mapping[str, str], scales: set[str]) -> None:
    """Raise `Mismatch` for a quantized weight without scales, or scales without a weight."""
    alone = min(numbers - scaled.keys(), default=None)
    if alone is not None:
        message = f"it is {layout.specs[alone]}, and no scales of it are here"
        raise Mismatch(message, path=layout.root, tensor=alone, hint="is a file of the model missing?")
    orphan = min((name for name in layout.tensors if name.endswith(OF_WEIGHTS) and name not in scales), default=None)
    if orphan is not None:
        weight = orphan.rpartition("_scale")[0]
        found = f"is {layout.specs[weight]}" if weight in layout.tensors else "is not here"
        message = f"these are scales, and `{weight}` {found}"
        raise Mismatch(message, path=layout.root, tensor=orphan, hint="is a file of the model missing?")


def eight_bits(layout: Layout, name: str, scale: str, blocks: tuple[Block, ...]) -> Packed:
    """Return a weight of 8 bits. Raises `Mismatch` for scales that are no numbers, or not as many as there have to be.

    `Unsupported` if more than one of the sizes of `blocks` would fit.
    """
    shape, found = layout.specs[name].shape, layout.specs[scale]
    if not (found.dtype.kind == "float" or found.dtype.name == "float8_e8m0fnu"):
        raise Mismatch(f"scales of {layout.specs[name]} cannot be {found}", path=layout.root, tensor=scale)
    if prod(found.shape) == 1:
        return Packed(scale, shape, shape)
    sizes = [*blocks, *([(1, shape[-1]), (shape[-2], shape[-1])] if len(shape) > 1 else [])]
    fitting = dict.fromkeys(steps for size in sizes if (steps := steps_of(shape, found.shape, size)))
    if not fitting:
        wanted = " or ".join(str(list(size)) for size in blocks)
        message = (
            f"there are {list(found.shape)} scales for {list(shape)} weights: no scale a row, or for each {wanted}"
        )
        raise Mismatch(message, path=layout.root, tensor=scale)
    if len(fitting) > 1:
        several = " or ".join(str(list(steps)) for steps in fitting)
        message = f"{list(found.shape)} scales for {list(shape)} weights may be for each {several}"
        raise Unsupported(message, path=layout.root, tensor=scale)
    return Packed(scale, shape, next(iter(fitting)))


def steps_of(shape: Shape, scales: Shape, size: Block) -> Shape | None:
    """Return the box of a weight that has one scale, if they are for blocks of this size; None if they are not.

    Blocks at the edges may be smaller. Of axes in front each index has scales of its own.
    """
    if len(shape) < 2 or len(scales) != len(shape):
        return None
    steps = (*(1 for _ in shape[:-2]), *(max(1, min(pair)) for pair in zip(size, shape[-2:], strict=True)))
    grid = tuple(-(-extent // step) for extent, step in zip(shape, steps, strict=True))
    return steps if grid == scales else None


def four_bits(layout: Layout, name: str, scale: str) -> Packed:
    """Return a weight in MXFP4. Raises `Mismatch` for shapes that it cannot have."""
    blocks, scales = layout.specs[name], layout.specs[scale]
    is_sound = len(blocks.shape) == 4 and blocks.shape[-1] == _PACK and blocks.shape[:-1] == scales.shape
    if not is_sound or scales.dtype.name != "uint8":
        raise Mismatch(f"blocks {blocks} do not go with scales {scales}", path=layout.root, tensor=name)
    experts, rows, groups, _ = blocks.shape
    return Packed(scale, (experts, 2 * _PACK * groups, rows), None)
