"""Compute quantized weights block by block: look up low-bit numbers in a table, and multiply them with their scales.

All is computed in float32 and rounded once, as torch's QuantizedHuggingFaceStorageReader and transformers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np

from ckptkit.engine.rearrange import view_of
from ckptkit.engine.recipes import FLOAT32, Array, as_stored
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape, cut_box, whole
from ckptkit.layout.casting import cast
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand, Region, same
from ckptkit.layout.small_floats import SMALL_FLOATS

_E8M0, _UINT8 = DTYPES["float8_e8m0fnu"], DTYPES["uint8"]
_BLOCK_ELEMENTS = 1 << 18  # elements at a time, as in `casting`: fits a CPU cache
_GROUP = 32  # numbers of MXFP4 that share a scale, two per byte
_MAX_EXPONENT = 252  # largest scale whose product with the largest 4-bit number fits float32


class Scaled:
    """The recipe of a tensor of 8-bit numbers, in which each box of size `steps` has one scale.

    Boxes at the edges may be smaller. A single scale, of any shape, is for the whole tensor.
    """

    def __init__(self, numbers: Operand, scales: Operand, shape_of_scales: Shape, steps: Shape) -> None:
        region: Region = (lambda _: whole(shape_of_scales)) if prod(shape_of_scales) == 1 else self._boxes
        self.operands = (numbers, scales._replace(region=region))
        self._steps = steps

    def _boxes(self, box: Box) -> Box:
        """Return the box of scales that apply to a box of elements."""
        start = tuple(a // step for a, step in zip(box.start, self._steps, strict=True))
        stop = (-(-b // step) for b, step in zip(box.stop, self._steps, strict=True))
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`. Raises `Corrupt` for invalid scales."""
        numbers, scales = self.operands
        raw = np.frombuffer(blocks[0], np.uint8)
        factors = as_numbers(scales, blocks[1])
        check_factors(factors, scales.name, largest(numbers.dtype))
        scale_box = self._boxes(box)
        if len(factors) > 1:
            factors = factors.reshape(scale_box.size)
        converted = np.empty(box.numel, f"u{dtype.itemsize}")
        stop = 0
        for block in cut_box(box, _BLOCK_ELEMENTS):
            start, stop = stop, stop + block.numel
            block_factors = (
                self._spread(view_of(factors, self._boxes(block), scale_box), block) if factors.ndim > 1 else factors
            )
            values = decode(raw[start:stop], numbers.dtype).reshape(block.size)
            if not block_factors.all() and values[np.broadcast_to(block_factors == 0, values.shape)].any():
                raise Corrupt(f"a scale in `{scales.name}` is 0, but the values that it scales are not")
            values *= block_factors
            cast(values.reshape(-1), FLOAT32, dtype, converted[start:stop])
        return converted.data.cast("B"), False

    def _spread(self, factors: Array, box: Box) -> Array:
        """Return the factors of a box's elements, with extent 1 on axes that share a scale.

        The last axes are the largest.
        """
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
        bytes_of: Region = lambda box: self._experts(box, (*self._rest, _GROUP // 2))  # noqa: E731
        self.operands = (
            numbers._replace(region=bytes_of),
            scales._replace(region=lambda box: self._experts(box, self._rest)),
        )

    def _experts(self, box: Box, rest: Shape) -> Box:
        return Box((box.start[0], *(0 for _ in rest)), (box.size[0], *rest))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`. Raises `Corrupt` for invalid scales."""
        numbers, scales = self.operands
        low, high = box.start[1] // _GROUP, -(-box.stop[1] // _GROUP)
        part = (slice(None), slice(box.start[2], box.stop[2]), slice(low, high))
        raw = np.frombuffer(blocks[0], np.uint8).reshape(numbers.region(box).size)[part]
        exponents = np.frombuffer(blocks[1], np.uint8).reshape(scales.region(box).size)[part]
        if exponents.size and (worst := int(exponents.max())) > _MAX_EXPONENT:
            raise Corrupt(
                f"expected scales of at most 2**{_MAX_EXPONENT - 127} in `{scales.name}`, found 2**{worst - 127}"
            )
        values = pairs().take(raw).view(np.float32).reshape(*exponents.shape, _GROUP)
        values *= table(_E8M0)[exponents][..., None]
        rows = values.reshape(*exponents.shape[:2], -1).transpose(0, 2, 1)
        first = box.start[1] - low * _GROUP
        return as_stored(rows[:, first : first + box.size[1]], FLOAT32, dtype), False


def scaled(numbers: Operand, scales: Operand, shape_of_scales: Shape, steps: Shape) -> Scaled:
    """Return the recipe of a tensor of 8-bit numbers. Its operands are read in the dtypes in which they are stored."""
    return Scaled(numbers._replace(region=same), as_read(scales), shape_of_scales, steps)


def as_numbers(operand: Operand, block: memoryview) -> Array:
    """Return scales as a flat float32 array. Bytes are exponents."""
    if operand.dtype == _UINT8:
        return table(_E8M0)[np.frombuffer(block, np.uint8)]
    if operand.dtype.name in SMALL_FLOATS:
        return table(operand.dtype)[np.frombuffer(block, np.uint8)]
    return np.frombuffer(block, np.float32)


def as_read(scales: Operand) -> Operand:
    """Return scales in the dtype to read them: floats of 16 bits and more as float32, others as they are stored."""
    return scales._replace(dtype=FLOAT32) if scales.dtype.kind == "float" else scales


def check_factors(factors: Array, name: str, most: float) -> None:
    """Raise `Corrupt` for scales that are negative, NaN, or so large that a product overflows float32."""
    limit = float(np.finfo(np.float32).max) / most
    if factors.size and not (
        factors.min() >= 0 and factors.max() <= limit
    ):  # written with `not`: comparisons with NaN are false
        worst = factors[~((factors >= 0) & (factors <= limit))][0]
        raise Corrupt(
            f"expected a scale in `{name}`, found {worst:g}",
            hint="run `ckptkit verify`: these bytes may belong to another tensor",
        )


@cache
def table(dtype: DType) -> Array:
    return np.array(SMALL_FLOATS[dtype.name].numbers, np.float32)


def decode(raw: Array, dtype: DType) -> Array:
    """Return the numbers that bytes encode. Looks up two at once, which takes half the time."""
    if len(raw) % 2:
        return table(dtype).take(raw)
    return number_pairs(dtype).take(raw.view(np.uint16)).view(np.float32)


@cache
def number_pairs(dtype: DType) -> Array:
    """Return a lookup table for pairs of bytes: their two numbers as one element of 8 bytes."""
    both = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return table(dtype)[both].view(np.uint64)


@cache
def pairs() -> Array:
    """Return a lookup table for bytes: the two 4-bit numbers of each, low half first, as one element of 8 bytes."""
    numbers = np.array(SMALL_FLOATS["float4_e2m1fn_x2"].numbers, np.float32)
    both = np.arange(256)
    halves = np.stack([numbers[both & 15], numbers[both >> 4]], axis=1)
    return np.ascontiguousarray(halves).view(np.uint64).reshape(-1)


def largest(dtype: DType) -> float:
    numbers = table(dtype)
    return float(numbers[np.isfinite(numbers)].max())
