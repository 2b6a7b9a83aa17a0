"""Find integers of compressed-tensors: packed as `X.weight_packed`, or int8 as `X.weight`. Scales are `X.weight_scale`.

Packed integers are int32 `[O, I*bits/32]`, the first number in the lowest bits, with an offset that makes them
positive. `X.weight_shape` is the shape. `X.weight_zero_point` has a zero point for each scale, packed along the rows,
or int8. A scale is for a group of neighbors, a row, or the whole weight. Products are rounded to the dtype of the
scales.

Sources: compressed_tensors/compressors/pack_quantized and naive_quantized, quantization/lifecycle/forward_helpers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from ckptkit.errors import Unsupported
from ckptkit.layout import Spec
from ckptkit.layout.box import Shape
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import Integers, QuantizationConfig
from ckptkit.state.quantized.packed import Packed, Specs, partner_mismatch_error, require_partner_shape

PACKED = ".weight_packed"
_SCALE, _ZEROS, _SHAPE = "_scale", "_zero_point", "_shape"
_BITS = (4, 8)
_WORD = 32


@dataclass(frozen=True, slots=True)
class Fit:
    """How to read the integers of one weight: their encoding, shape, group size, and related tensors.

    `of_scales` and `of_zeros` are the specs of the scales and zero points (None without zero points).
    """

    way: Integers
    shape: Shape
    group: int
    of_scales: Spec
    of_zeros: Spec | None = None
    is_packed: bool = True
    is_declared: bool = False  # by a tensor with its shape


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:
    """Yield the weights that are integers with scales. Raises `Mismatch` for a wrong shape, or `Unsupported`."""
    for name, spec in specs.items():
        is_packed = name.endswith(PACKED) and spec.dtype.name == "int32"
        if not is_packed and not (spec.dtype.name == "int8" and len(spec.shape) > 1):
            continue
        stem = name.removesuffix("_packed") if is_packed else name
        if (scale := f"{stem}{_SCALE}") in specs and specs[scale].dtype.kind == "float":
            yield name, packed_from_integers(specs, name, stem, stated)


def packed_from_integers(specs: Specs, name: str, stem: str, stated: QuantizationConfig) -> Packed:
    """Return the weight that integers encode."""
    scale, zeros, shape = f"{stem}{_SCALE}", f"{stem}{_ZEROS}", f"{stem}{_SHAPE}"
    fit = choose_encoding_fit(specs, name, scale, stated)
    beside = [scale]
    if zeros in specs:
        zeros_spec, scales_shape = specs[zeros], fit.of_scales.shape
        if zeros_spec.dtype.name == "int8":
            require_partner_shape(specs, zeros, scales_shape, "as many zero points as scales")
        elif zeros_spec.dtype.name != "int32" or fit.way.is_symmetric:
            kind = "symmetric" if fit.way.is_symmetric else "not symmetric"
            raise partner_mismatch_error(zeros, f"zero points of a model that config.json calls {kind}", zeros_spec)
        else:
            rows = -(-fit.shape[-2] * fit.way.bits // _WORD)
            require_partner_shape(specs, zeros, (*scales_shape[:-2], rows, scales_shape[-1]), "zero points in words")
        beside.append(zeros)
    elif not fit.way.is_symmetric:
        raise partner_mismatch_error(name, f"zero points in `{zeros}`, as config.json says", "none")
    if shape in specs:
        require_partner_shape(specs, shape, (len(fit.shape),), "the sizes of a shape")
        beside.append(shape)
    fit = replace(fit, of_zeros=specs.get(zeros), is_packed=name != stem, is_declared=shape in specs)
    group = () if prod(fit.of_scales.shape) == 1 else (1, fit.group)
    return Packed(f"int{fit.way.bits}", fit.shape, tuple(beside), group, partial(recipe, fit))


def choose_encoding_fit(specs: Specs, name: str, scale: str, stated: QuantizationConfig) -> Fit:
    """Return how to read a weight: with the only encoding in config.json that fits its shapes."""
    stored, scales = specs[name], specs[scale]
    ways = stated.integers
    if not ways:
        message = f"found {stored}, but config.json does not say how many bits a number has"
        hint = "check that the quantized model's config.json is there"
        raise Unsupported(message, tensor=name, hint=hint)
    fits = [fit for way in ways if (fit := find_fit_in_encoding(stored, scales, way)) is not None]
    if len({(fit.way.bits, fit.shape, fit.group) for fit in fits}) > 1:
        several = " or ".join(f"{fit.way.bits} bits" for fit in fits)
        message = f"{stored} with {list(scales.shape)} scales may be numbers of {several}"
        raise Unsupported(message, tensor=name)
    if not fits:
        scales_of = {way: "a scale per row" if way.group is None else f"a scale for {way.group}" for way in ways}
        wanted = " or ".join(f"{way.bits} bits with {words}" for way, words in scales_of.items())
        raise partner_mismatch_error(scale, f"scales for {stored} of {wanted}", list(scales.shape))
    (fit, *_) = fits
    if fit.way.bits not in _BITS or fit.way.is_ordered:
        what = "columns in the order of their activations" if fit.way.is_ordered else f"{fit.way.bits} bits"
        message = f"config.json says that integers have {what}: ckptkit reads 4 and 8 bits, in order"
        raise Unsupported(message, tensor=name)
    return fit


def find_fit_in_encoding(stored: Spec, scales: Spec, encoding: Integers) -> Fit | None:
    """Return how to read a weight in one encoding; None if its shapes do not fit."""
    bits = encoding.bits if stored.dtype.name == "int32" else 8
    if bits != encoding.bits or len(stored.shape) < 2 or (stored.dtype.name == "int32" and bits > _WORD):
        return None
    width = stored.shape[-1] * 8 * stored.dtype.itemsize // bits
    if encoding.group is not None and len(scales.shape) == len(stored.shape):
        columns = scales.shape[-1] * encoding.group
        is_filled = -(-columns * bits // (8 * stored.dtype.itemsize)) == stored.shape[-1]
        fits = is_filled and scales.shape[:-1] == stored.shape[:-1]
        return Fit(encoding, (*stored.shape[:-1], columns), encoding.group, scales) if fits else None
    a_row = (*stored.shape[:-1], 1)
    if encoding.group is None and (scales.shape == a_row or prod(scales.shape) == 1):
        return Fit(encoding, (*stored.shape[:-1], width), width, scales)
    return None


def recipe(fit: Fit, operands: Sequence[Operand]) -> Recipe:
    """Return the recipe of a weight from numbers, scales, zero points and the shape."""
    from ckptkit.state.quantized import grouped_blocks as blocks  # imports numpy, which plain copies do not need
    from ckptkit.state.quantized.dequantize_blocks import with_read_dtype

    numbers, scales, *more_operands = operands
    parts: list[blocks.GroupStep] = []
    if fit.is_declared:
        parts.append(blocks.DeclaredShape(more_operands.pop(), fit.shape))
    if fit.of_zeros is not None:
        bits = fit.way.bits if fit.of_zeros.dtype.name == "int32" else None
        parts.append(blocks.ZeroPoints(more_operands.pop(), fit.of_zeros.shape, bits))
    elif fit.group < fit.shape[-1]:
        parts.append(blocks.Extremes(fit.way.bits))
    parts.append(blocks.Factors(with_read_dtype(scales), fit.of_scales.shape, 1 << fit.way.bits))
    half = 1 << (fit.way.bits - 1)
    signed = range(-half, half)
    integers = signed if fit.is_packed else (*signed[half:], *signed[:half])  # by bit pattern
    codes = blocks.Codes(fit.way.bits, tuple(map(float, integers)))
    return blocks.GroupedRecipe(numbers, codes, parts, fit.shape, fit.group, fit.of_scales.dtype)
