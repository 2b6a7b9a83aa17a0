"""Measure the distance of stored elements of any two dtypes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.engine.casting import widen_into
from ckptkit.engine.counting import sum_of_squares
from ckptkit.engine.distance import Distance, Tolerance
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import SMALL_FLOATS, DType

Array = NDArray[Any]
Elements = tuple[memoryview, DType]  # stored bytes and their dtype

_PART = 1 << 17  # elements at a time: the number in `casting` would take 8 MiB more per thread
_NUMPY = {  # dtypes with another name in numpy, or read as bits
    "bool": "uint8",
    "quint8": "uint8",
    "qint8": "int8",
    "qint32": "int32",
    "bfloat16": "uint16",
    "complex32": "float16",
    **dict.fromkeys(SMALL_FLOATS, "uint8"),
}


@np.errstate(all="ignore")
def measure_distance(a: Elements, b: Elements, box: Box, tolerance: Tolerance | None = None) -> Distance:
    """Return the distance between the elements of `box`, row-major in both, in dtypes that can be compared.

    Without a tolerance elements of one dtype differ if any bit differs, elements of two dtypes if their values do; then
    NaN equals NaN.
    """
    distance, rows = Distance(), _Scratch()
    for start in range(0, box.numel, _PART):
        part = slice(start, min(start + _PART, box.numel))
        distance = distance.merge(
            _distance_of_part(_slice_elements(a, part), _slice_elements(b, part), box, start, tolerance, rows)
        )
    return distance


@np.errstate(all="ignore")
def sum_of_finite_squares(elements: Elements) -> float:
    """Return the sum of squares of the finite elements."""
    data, dtype = elements
    numel = len(data) // dtype.itemsize
    parts = (slice(start, min(start + _PART, numel)) for start in range(0, numel, _PART))
    rows = _Scratch()
    return sum(
        _sum_finite_squares(_widen(_decode_values(_slice_elements(elements, part), rows.narrow[0]))) for part in parts
    )


def _slice_elements(elements: Elements, part: slice) -> Elements:
    data, dtype = elements
    return data[part.start * dtype.itemsize : part.stop * dtype.itemsize], dtype


class _Scratch:
    """Reusable memory for the values of a part: allocating it each time would cost more than the arithmetic.

    `narrow` is for the values of each side as float32, `row` for these and for their differences in float64.
    """

    def __init__(self) -> None:
        self._rows = np.empty((3, 2 * _PART))  # untouched pages take no memory
        self.narrow = np.empty((2, _PART), np.float32)

    def row(self, number: int, shape: tuple[int, ...]) -> Array:
        return self._rows[number, : prod(shape)].reshape(shape)


def _distance_of_part(
    a: Elements, b: Elements, box: Box, start: int, tolerance: Tolerance | None, rows: _Scratch
) -> Distance:
    x, y = _promoted(_decode_values(a, rows.narrow[0]), _decode_values(b, rows.narrow[1]), rows)
    gaps = _absolute_differences(x, y, rows)
    if tolerance is None and a[1] == b[1]:
        is_different = _bits_differ(a, b)
    else:
        tolerance = tolerance or Tolerance()
        room = tolerance.atol + tolerance.rtol * np.abs(_widen(y))
        is_close: Array = (x == y) | (np.isfinite(gaps) & (gaps <= room)) | (np.isnan(x) & np.isnan(y))
        is_different = np.logical_not(is_close)
    wide = gaps.astype(np.float64, copy=False)
    gap, strange = _sum_of_squares(wide), 0
    if not np.isfinite(gap):
        is_finite = np.isfinite(x) & np.isfinite(y)
        strange = int(np.count_nonzero(is_different & ~is_finite))
        gaps = gaps[is_finite]
        gap = _sum_of_squares(gaps)
    if is_different.ndim == 2:
        is_different = np.logical_or.reduce(is_different, axis=1)
    first, at = None, int(is_different.argmax())
    if is_different[at]:
        index = np.unravel_index(start + at, box.size) if box.size else ()
        first = tuple(low + int(i) for low, i in zip(box.start, index, strict=True))
    return Distance(
        elements=len(is_different),
        different=int(np.count_nonzero(is_different)),
        strange=strange,
        max_abs=gaps.max(initial=0).item(),
        gap=gap,
        size_a=_sum_finite_squares(_widen(x)),
        size_b=_sum_finite_squares(_widen(y)),
        first=first,
    )


def _decode_values(elements: Elements, memory: Array) -> Array:
    """Return the values, exactly; two per row where an element has two. `memory` is for what numpy does not have."""
    data, dtype = elements
    stored: Array = np.frombuffer(data, _NUMPY.get(dtype.name, dtype.name))
    if dtype.name == "bfloat16":
        return widen_into(memory[: len(stored)], stored, dtype)
    if dtype.name == "complex32":
        return stored.astype(np.float32).view(np.complex64)
    if dtype.kind == "small_float":
        kind = SMALL_FLOATS[dtype.name]
        codes = stored if kind.nbits == 8 else np.stack([stored & 15, stored >> 4], axis=1)
        return np.array(kind.value_by_bits)[codes]
    return stored


def _promoted(x: Array, y: Array, rows: _Scratch) -> tuple[Array, Array]:
    """Return both in a dtype that represents the values of each: integers stay integers, floats become float64."""
    kind = np.promote_types(x.dtype, y.dtype)
    if kind.kind == "f":
        wide = rows.row(0, x.shape), rows.row(1, y.shape)
        np.copyto(wide[0], x)
        np.copyto(wide[1], y)
        return wide
    if kind.kind == "c":
        kind = np.promote_types(kind, np.float64)
    return x.astype(kind, copy=False), y.astype(kind, copy=False)


def _absolute_differences(x: Array, y: Array, rows: _Scratch) -> Array:
    """Return |x - y|; unsigned for integers, so that it cannot overflow."""
    gaps: Array
    if x.dtype == np.float64:
        gaps = np.subtract(x, y, out=rows.row(2, x.shape))
        return np.abs(gaps, out=gaps)
    if x.dtype.kind in "iu":
        unsigned = f"u{x.dtype.itemsize}"
        gaps = np.subtract(np.maximum(x, y).view(unsigned), np.minimum(x, y).view(unsigned))
    else:
        gaps = np.abs(x - y)
    return gaps


def _bits_differ(a: Elements, b: Elements) -> Array:
    itemsize = a[1].itemsize
    raw = f"u{min(itemsize, 8)}"
    differ: Array = np.not_equal(np.frombuffer(a[0], raw), np.frombuffer(b[0], raw))
    if itemsize > 8:
        differ = np.logical_or.reduce(differ.reshape(-1, itemsize // 8), axis=1)
    return differ


def _widen(numbers: Array) -> Array:
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64, copy=False)


def _sum_finite_squares(numbers: Array) -> float:
    total = _sum_of_squares(numbers)
    return total if np.isfinite(total) else _sum_of_squares(numbers[np.isfinite(numbers)])


def _sum_of_squares(numbers: Array) -> float:
    return sum_of_squares(np.ascontiguousarray(numbers).reshape(-1).view(np.float64))
