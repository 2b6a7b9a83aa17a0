"""Find 4-bit floats, two per byte, low half first: NVFP4, MXFP4 in rows, and the experts of DeepSeek V4.

| numbers | scales | |
|---|---|---|
| `X.weight_packed` `[O, I/2]` | `X.weight_scale` e4m3 `[O, I/16]`, over `X.weight_global_scale` | compressed-tensors |
| `X.weight` `[O, I/2]` | `X.weight_scale` e4m3 `[O, I/16]`, times `X.weight_scale_2` | ModelOpt |
| either | `X.weight_scale` uint8 `[O, I/32]`, exponents | MXFP4 of both |
| `X.weight` int8 `[O, I/2]` | `X.scale` or `X.weight_scale_inv` e8m0 `[O, I/32]` | DeepSeek V4 |

The default dtype of numbers is uint8.

Sources: compressed_tensors/compressors/nvfp4 and mxfp4, modelopt/torch/quantization/qtensor/nvfp4_tensor.py, and
transformers/integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from ckptkit.layout.box import Shape
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import QuantizationConfig
from ckptkit.state.quantized.packed import (
    Packed,
    Specs,
    find_scale_name,
    is_exponent_dtype,
    partner_mismatch_error,
    require_partner_shape,
)
from ckptkit.state.quantized.stored.integers import PACKED

_BYTES = ("uint8", "int8", "float4_e2m1fn_x2")
_GLOBAL, _SECOND = "_global_scale", "_scale_2"
_NVFP4, _MXFP4 = 16, 32  # numbers that share a scale


class Level(NamedTuple):
    """A scale for a whole weight, by which the scales of its groups are multiplied or divided."""

    name: str
    divides: bool


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:
    """Yield the weights that are 4-bit floats with scales. Raises `Mismatch` for related tensors of a wrong shape."""
    for name, spec in specs.items():
        if spec.dtype.name not in _BYTES or len(spec.shape) < 2:
            continue
        stem = name.removesuffix("_packed") if name.endswith(PACKED) else name
        scale = find_scale_name(stem, specs)
        if scale is None or specs[scale].dtype.name in ("int8", "int32"):
            continue
        levels = (Level(stem + _GLOBAL, divides=True), Level(stem + _SECOND, divides=False))
        level = next((level for level in levels if level.name in specs), None)
        may_be_integers = spec.dtype.name == "int8" and stated.method != "fp8"  # if the method is unknown
        if level is not None or is_exponent_dtype(specs[scale]) or not may_be_integers:
            yield name, packed_from_floats4(specs, name, scale, level)


def packed_from_floats4(specs: Specs, name: str, scale: str, level: Level | None) -> Packed:
    """Return the weight that 4-bit floats encode. Raises `Mismatch` for scales with a wrong dtype or shape."""
    stored, scales = specs[name], specs[scale]
    group = _MXFP4 if level is None else _NVFP4
    fits = is_exponent_dtype(scales) if level is None else scales.dtype.name == "float8_e4m3fn"
    if not fits:
        wanted = "exponents (float8_e8m0fnu or uint8)" if level is None else "float8_e4m3fn"
        raise partner_mismatch_error(scale, f"scales in {wanted} for {stored}", scales.dtype)
    columns = 2 * stored.shape[-1]
    if columns % group:
        raise partner_mismatch_error(name, f"columns in groups of {group}", columns)
    shape = (*stored.shape[:-1], columns)
    require_partner_shape(specs, scale, (*shape[:-1], columns // group), f"a scale for {group} numbers,")
    if level is None:
        make = partial(recipe, shape, group, (scales.shape,), divides=False)
        return Packed("mxfp4", shape, (scale,), (1, group), make)
    level_spec = specs[level.name]
    if prod(level_spec.shape) != 1 or level_spec.dtype.kind != "float":
        raise partner_mismatch_error(level.name, "one number for the whole weight", level_spec)
    make = partial(recipe, shape, group, (scales.shape, level_spec.shape), divides=level.divides)
    return Packed("nvfp4", shape, (scale, level.name), (1, group), make)


def recipe(
    shape: Shape, group: int, shapes_of_scales: Sequence[Shape], operands: Sequence[Operand], *, divides: bool
) -> Recipe:
    """Return the recipe of a weight with scales for its groups, and perhaps one scale for all of it."""
    from ckptkit.state.quantized import grouped_blocks as blocks  # imports numpy, which plain copies do not need
    from ckptkit.state.quantized.dequantize_blocks import FOUR_BITS, with_read_dtype

    numbers, scales, *level = operands
    part = blocks.Factors(scales, shapes_of_scales[0], max(FOUR_BITS))
    if level:
        part = blocks.TwoLevels(scales, with_read_dtype(level[0]), shapes_of_scales, divides=divides)
    return blocks.GroupedRecipe(numbers, blocks.Codes(4, FOUR_BITS), [part], shape, group)
