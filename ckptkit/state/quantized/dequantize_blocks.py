"""Compute quantized weights block by block: look up low-bit numbers in a table, and multiply them with their scales.

All is computed in float32 and rounded once, as torch's QuantizedHuggingFaceStorageReader and transformers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite, prod

import numpy as np

from ckptkit.engine.casting import cast_into
from ckptkit.engine.rearrange import view_of_region
from ckptkit.engine.recipes import FLOAT32, Array, round_to_bytes
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape, cut_box, full_box
from ckptkit.layout.dtypes import SMALL_FLOATS, DType
from ckptkit.layout.plan import Operand, Region

_EXPONENTS = SMALL_FLOATS["float8_e8m0fnu"].value_by_bits
FOUR_BITS = SMALL_FLOATS["float4_e2m1fn_x2"].value_by_bits
_BLOCK_ELEMENTS = 1 << 18  # elements at a time, as in `casting`: fits a CPU cache
_GROUP = 32  # numbers of MXFP4 that share a scale, two per byte
_MAX_EXPONENT = 252  # largest scale whose product with the largest 4-bit number fits float32


class Scaled:
    """The recipe of a tensor of 8-bit numbers, in which each box of size `steps` has one scale.

    Boxes at the edges may be smaller. A single scale, of any shape, is for the whole tensor.
    """

    def __init__(self, numbers: Operand, scales: Operand, shape_of_scales: Shape, steps: Shape) -> None:
        region: Region = (lambda _: full_box(shape_of_scales)) if prod(shape_of_scales) == 1 else self._box_of_scales
        self.operands = (numbers, scales._replace(region=region))
        self._steps = steps

    def _box_of_scales(self, box: Box) -> Box:
        """Return the box of scales that apply to a box of elements."""
        start = tuple(a // step for a, step in zip(box.start, self._steps, strict=True))
        stop = (-(-b // step) for b, step in zip(box.stop, self._steps, strict=True))
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`. Raises `Corrupt` for invalid scales."""
        numbers, scales = self.operands
        raw = np.frombuffer(blocks[0], np.uint8)
        factors = scales_as_float32(scales, blocks[1])
        check_scale_factors(factors, scales.name, max(filter(isfinite, SMALL_FLOATS[numbers.dtype.name].value_by_bits)))
        scale_box = self._box_of_scales(box)
        if len(factors) > 1:
            factors = factors.reshape(scale_box.size)
        converted = np.empty(box.numel, f"u{dtype.itemsize}")
        stop = 0
        for block in cut_box(box, _BLOCK_ELEMENTS):
            start, stop = stop, stop + block.numel
            block_factors = factors
            if factors.ndim > 1:
                block_factors = self._factors_of_elements(
                    view_of_region(factors, self._box_of_scales(block), scale_box), block
                )
            stored = raw[start:stop]
            if len(stored) % 2:
                values = value_table_of(SMALL_FLOATS[numbers.dtype.name].value_by_bits).take(stored)
            else:  # two bytes at once, which takes half the time
                values = value_pairs_by_byte_pair(numbers.dtype).take(stored.view(np.uint16)).view(np.float32)
            values = values.reshape(block.size)
            check_zero_scales(values, block_factors, scales.name)
            values *= block_factors
            cast_into(values.reshape(-1), FLOAT32, dtype, converted[start:stop])
        return converted.data.cast("B"), False

    def _factors_of_elements(self, factors: Array, box: Box) -> Array:
        """Return the factors of a box's elements, of extent 1 on axes that share a scale, the last axes first."""
        for axis, step in reversed(list(enumerate(self._steps))):
            if step > 1 and factors.shape[axis] > 1:
                index = np.arange(box.start[axis], box.stop[axis]) // step - box.start[axis] // step
                factors = factors.take(index, axis)
        return factors


class Transposed4:
    """The recipe of a tensor `[E, G*32, R]` of 4-bit numbers: MXFP4, stored as bytes `[E, R, G, 16]`.

    The low half of a byte comes first. Each 16 bytes have a scale in `[E, R, G]`, a power of 2. Any row needs all bytes
    of its expert, because rows of the weight are columns in the file.
    """

    def __init__(self, numbers: Operand, scales: Operand, shape: Shape) -> None:
        _, columns, rows = shape
        self._rest: Shape = (rows, columns // _GROUP)
        bytes_of: Region = lambda box: self._box_of_full_experts(box, (*self._rest, _GROUP // 2))  # noqa: E731
        self.operands = (
            numbers._replace(region=bytes_of),
            scales._replace(region=lambda box: self._box_of_full_experts(box, self._rest)),
        )

    def _box_of_full_experts(self, box: Box, rest: Shape) -> Box:
        return Box((box.start[0], *(0 for _ in rest)), (box.size[0], *rest))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`. Raises `Corrupt` for invalid scales."""
        numbers, scales = self.operands
        low, high = box.start[1] // _GROUP, -(-box.stop[1] // _GROUP)
        part = (slice(None), slice(box.start[2], box.stop[2]), slice(low, high))
        raw = np.frombuffer(blocks[0], np.uint8).reshape(numbers.region(box).size)[part]
        exponents = np.frombuffer(blocks[1], np.uint8).reshape(scales.region(box).size)[part]
        if exponents.size and (worst := int(exponents.max())) > _MAX_EXPONENT:
            most = f"2**{_MAX_EXPONENT - 127}"
            raise Corrupt(f"expected scales of at most {most} in `{scales.name}`, found 2**{worst - 127}")
        values = four_bit_pair_table(FOUR_BITS).take(raw).view(np.float32).reshape(*exponents.shape, _GROUP)
        values *= value_table_of(_EXPONENTS)[exponents][..., None]
        rows = values.reshape(*exponents.shape[:2], -1).transpose(0, 2, 1)
        first = box.start[1] - low * _GROUP
        return round_to_bytes(rows[:, first : first + box.size[1]], FLOAT32, dtype), False


def scales_as_float32(operand: Operand, block: memoryview) -> Array:
    """Return scales as a flat float32 array. Bytes are exponents."""
    if operand.dtype.kind == "float":
        return np.frombuffer(block, np.float32)
    numbers = _EXPONENTS if operand.dtype.name == "uint8" else SMALL_FLOATS[operand.dtype.name].value_by_bits
    return value_table_of(numbers)[np.frombuffer(block, np.uint8)]


def with_read_dtype(scales: Operand) -> Operand:
    """Return scales in the dtype to read them: floats of 16 bits and more as float32, others as they are stored."""
    return scales._replace(dtype=FLOAT32) if scales.dtype.kind == "float" else scales


def check_scale_factors(factors: Array, name: str, largest_number: float) -> None:
    """Raise `Corrupt` for scales that are negative, NaN, or so large that a product overflows float32."""
    limit = float(np.finfo(np.float32).max) / largest_number
    # written with `not`: comparisons with NaN are false
    if factors.size and not (factors.min() >= 0 and factors.max() <= limit):
        worst = factors[~((factors >= 0) & (factors <= limit))][0]
        hint = "run `ckptkit verify`: these bytes may belong to another tensor"
        raise Corrupt(f"expected scales from 0 to {limit:g} in `{name}`, found {worst:g}", hint=hint)


def check_zero_scales(values: Array, factors: Array, name: str) -> None:
    """Raise `Corrupt` for a scale of 0 whose numbers are not all 0."""
    if not factors.all() and values[np.broadcast_to(factors == 0, values.shape)].any():
        raise Corrupt(f"a scale in `{name}` is 0, but the values that it scales are not")


@cache
def value_table_of(numbers: tuple[float, ...]) -> Array:
    return np.array(numbers, np.float32)


@cache
def value_pairs_by_byte_pair(dtype: DType) -> Array:
    """Return a lookup table for pairs of bytes: their two numbers as one element of 8 bytes."""
    both = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return value_table_of(SMALL_FLOATS[dtype.name].value_by_bits)[both].view(np.uint64)


@cache
def four_bit_pair_table(numbers: tuple[float, ...]) -> Array:
    """Return a lookup table for bytes: the two 4-bit numbers of each, low half first, as one element of 8 bytes."""
    both = np.arange(256)
    halves = np.stack([value_table_of(numbers)[both & 15], value_table_of(numbers)[both >> 4]], axis=1)
    return np.ascontiguousarray(halves).view(np.uint64).reshape(-1)
