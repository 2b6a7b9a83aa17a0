"""Find 8-bit floats that have scales.

The scales of `X.weight` are `X.weight_scale_inv` (DeepSeek's, which multiplies in spite of its name), `X.weight_scale`
(compressed-tensors, ModelOpt) or `X.scale` (DeepSeek V4). Fused experts have an additional first axis. Scales of MXFP8
are exponents, in float8_e8m0fnu or uint8.

Sources: transformers/integrations/finegrained_fp8.py and compressed_tensors/compressors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Spec
from ckptkit.layout.box import Shape
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import Block, QuantizationConfig
from ckptkit.state.quantized.packed import Packed, Specs, find_scale_name, is_exponent_dtype


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:
    """Yield the weights that are 8-bit floats and have scales."""
    for name, spec in specs.items():
        if is_float8_weight(spec) and (scale := find_scale_name(name, specs)) is not None:
            steps = scale_block_of_weight(specs, name, scale, stated.blocks)
            group = () if steps == spec.shape else steps[-2:]
            make = partial(scaled_floats_recipe, specs[scale].shape, steps)
            yield name, Packed("fp8", spec.shape, (scale,), group, make)


def is_float8_weight(spec: Spec) -> bool:
    """Return whether a tensor has 8-bit floats that can be weights. Floats without a mantissa are scales."""
    return spec.dtype.kind == "small_float" and not spec.dtype.name.endswith(("_x2", "e8m0fnu"))


def scaled_floats_recipe(shape_of_scales: Shape, steps: Shape, operands: Sequence[Operand]) -> Recipe:
    """Return the recipe of a weight with scales of this shape, each for a box of size `steps`."""
    from ckptkit.state.quantized.dequantize_blocks import (  # imports numpy, which plain copies do not need
        Scaled,
        with_read_dtype,
    )

    return Scaled(operands[0], with_read_dtype(operands[1]), shape_of_scales, steps)


def scale_block_of_weight(specs: Specs, name: str, scale: str, blocks: tuple[Block, ...]) -> Shape:
    """Return the box of an 8-bit weight that shares one scale.

    Raises `Mismatch` for scales of a wrong dtype or number, and `Unsupported` if more than one of the sizes in `blocks`
    fits.
    """
    shape, scales = specs[name].shape, specs[scale]
    if not (scales.dtype.kind == "float" or is_exponent_dtype(scales)):
        raise Mismatch(f"expected floats or exponents as scales of {specs[name]}, found {scales}", tensor=scale)
    if prod(scales.shape) == 1:
        return shape
    sizes = [*blocks, *([(1, shape[-1]), (shape[-2], shape[-1])] if len(shape) > 1 else [])]
    fitting = dict.fromkeys(steps for size in sizes if (steps := find_scale_block(shape, scales.shape, size)))
    if not fitting:
        wanted = f"one scale per row or per {' or '.join(str(list(size)) for size in blocks)}"
        message = f"expected {wanted} for weights {list(shape)}, found {list(scales.shape)} scales"
        raise Mismatch(message, tensor=scale)
    if len(fitting) > 1:
        several = " or ".join(str(list(steps)) for steps in fitting)
        message = f"{list(scales.shape)} scales of {list(shape)} weights are ambiguous: one for each {several}"
        raise Unsupported(message, tensor=scale)
    return next(iter(fitting))


def find_scale_block(shape: Shape, scales: Shape, size: Block) -> Shape | None:
    """Return the box of a weight that shares one scale, if the scales are for blocks of this size; else None.

    Blocks at the edges may be smaller. Each index of the axes before the last two has scales of its own.
    """
    if len(shape) < 2 or len(scales) != len(shape):
        return None
    steps = (*(1 for _ in shape[:-2]), *(max(1, min(pair)) for pair in zip(size, shape[-2:], strict=True)))
    grid = tuple(-(-extent // step) for extent, step in zip(shape, steps, strict=True))
    return steps if grid == scales else None
