"""Quantize matrices block by block: 8-bit values, and one scale per box of values.

All arithmetic is in float32, and each value is rounded once. Values and scales are two tensors; each is computed from
the matrix independently, in any order and by any process, so the matrix is read twice. Sources:
transformers/integrations/finegrained_fp8.py (`Fp8Quantize`), compressed_tensors/quantization/utils/helpers.py
(`calculate_qparams`) and lifecycle/forward_helpers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.engine.casting import widener
from ckptkit.engine.recipes import FLOAT32, Array, round_to_bytes
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DTYPES, SMALL_FLOATS, DType
from ckptkit.layout.plan import Operand

_PART = 1 << 18  # elements at a time, as in `casting`
_E8M0, _TINY = DTYPES["float8_e8m0fnu"], np.finfo(np.float32).tiny
_LEAST = {"bfloat16": 2.0**-7, "float32": 2.0**-23}  # the scale of a box of zeros


# Rounding to float8_e4m3fn is to nearest, ties to even, as in torch.
#
# The upper 16 bits of a float32 determine the result, if their last bit is set wherever the lower half is not zero.
# This neither creates nor removes ties, since these bits have four more mantissa bits than the result. There are
# 65,536 upper halves, so a table has all results.
_MOST = 448.0
_SIGN, _NAN = 0x80, 0x7F
_ABOVE = 0x7F81  # upper halves from here on are NaN


def round_to_e4m3(values: Array) -> Array:
    """Return float32 values as bytes of float8_e4m3fn. Magnitudes above 448 become 448; NaN stays NaN."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    halves = bits & 0xFFFF
    halves += 0xFFFF  # carries into bit 16 unless the lower half is zero
    halves |= bits
    halves >>= 16
    codes: Array = e4m3_rounding_table().take(halves.astype(np.intp), mode="clip")
    return codes


@cache
def e4m3_rounding_table() -> Array:
    """Return the result byte for each upper half of a float32."""
    halves = np.arange(_ABOVE, dtype=np.uint32)
    values = np.left_shift(halves, 16).view(np.float32).astype(np.float64)
    numbers = np.array(SMALL_FLOATS["float8_e4m3fn"].value_by_bits[:_NAN])
    between = (numbers[:-1] + numbers[1:]) / 2
    below = np.searchsorted(between, values)  # for a tie, the lower neighbor
    is_tie = between[np.minimum(below, len(between) - 1)] == values
    codes = np.full(1 << 15, _NAN, np.uint8)
    codes[:_ABOVE] = below + (is_tie & (below % 2 == 1))
    return np.concatenate([codes, codes | np.uint8(_SIGN)])


@dataclass(frozen=True, slots=True)
class Grid:
    """The boxes of a matrix that share one scale: `rows` and `columns` of each box, which divide the matrix.

    Scales are stored as `dtype`. By default values are multiplied by the factor that maps the largest value of a box to
    448, and the inverse is stored. With `by_division` they are divided by the scale as stored, after rounding. A
    `dtype` of exponents only rounds each scale up to a power of 2.
    """

    rows: int
    columns: int
    dtype: DType
    by_division: bool = False

    def factors_for_peaks(self, peaks: Array) -> Array:
        """Return the factor (or divisor) for the values of each box, given the largest magnitude in each box.

        The result is also finite for a box of zeros, and for values too small for float32.
        """
        if self.by_division:
            scales = np.frombuffer(
                round_to_bytes(peaks / np.float32(_MOST), FLOAT32, self.dtype), f"u{self.dtype.itemsize}"
            )
            wide = widener(self.dtype)(scales).reshape(peaks.shape)
            return np.where(wide == 0, np.float32(_LEAST[self.dtype.name]), wide)
        with np.errstate(divide="ignore", over="ignore"):
            factors = np.float32(1) / peaks * np.float32(_MOST)  # in two steps, as torch divides a scalar by a tensor
        factors = np.where(np.isfinite(factors), factors, np.float32(1))
        return np.float32(1) / next_powers_of_two(np.float32(1) / factors) if self.dtype == _E8M0 else factors

    def slices_to_compute(self, shape: Shape) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of parts of the matrix to compute at once: complete boxes, at least one."""
        rows, columns = shape
        part_columns = self.columns * max(1, min(columns, _PART // self.rows) // self.columns)
        part_rows = self.rows * max(1, _PART // part_columns // self.rows)
        for top in range(0, rows, part_rows):
            for left in range(0, columns, part_columns):
                yield slice(top, min(top + part_rows, rows)), slice(left, min(left + part_columns, columns))


def next_powers_of_two(scales: Array) -> Array:
    """Return the scales rounded up to powers of 2, with float32 logarithms as in transformers."""
    logarithms = np.log2(np.maximum(scales, _TINY).astype(np.float64)).astype(np.float32)
    return np.exp2(np.ceil(logarithms))


class Matrix(NamedTuple):
    """The matrix to quantize: its source operand with dtype, its rows and columns."""

    operand: Operand
    rows: int
    columns: int

    def box_rows_in_memory(self, grid: Grid) -> int:
        """Return how many rows of boxes are in memory at once."""
        return max(1, BLOCK_BYTES // (grid.rows * self.columns * self.operand.dtype.itemsize))

    def rows_as_bits(self, block: memoryview) -> Array:
        return np.frombuffer(block, f"u{self.operand.dtype.itemsize}").reshape(-1, self.columns)

    def to_float32(self, stored: Array) -> Array:
        wide = widener(self.operand.dtype)(stored)
        with np.errstate(over="ignore", invalid="ignore"):
            return wide.astype(np.float32, copy=False)

    def peaks_by_box(self, values: Array, grid: Grid) -> Array:
        """Return the largest magnitude in each box. Raises `Corrupt` for NaN or infinity."""
        rows = np.maximum.reduce(np.abs(values).reshape(-1, grid.rows, values.shape[1]), axis=1)
        peaks: Array = np.maximum.reduce(rows.reshape(len(rows), -1, grid.columns), axis=2)
        if not np.isfinite(peaks).all():
            problem = "NaN" if np.isnan(peaks).any() else "a number that is infinite or too large for float32"
            hint = "skip the tensor with --exclude-quantize; `ckptkit stats` lists all such tensors"
            raise Corrupt(f"cannot choose a scale: the tensor contains {problem}", tensor=self.operand.name, hint=hint)
        return peaks


class QuantizedValues:
    """The recipe of the 8-bit values of a matrix."""

    def __init__(self, matrix: Matrix, grid: Grid) -> None:
        self.rows = matrix.box_rows_in_memory(grid) * grid.rows
        self.operands = (matrix.operand._replace(region=self._source_rows_of),)
        self._matrix, self._grid = matrix, grid

    def _source_rows_of(self, box: Box) -> Box:
        return Box((box.start[0], 0), (box.size[0], self._matrix.columns))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the 8-bit values of some rows. Raises `Corrupt` for NaN or infinity."""
        stored, grid = self._matrix.rows_as_bits(blocks[0]), self._grid
        quantized = np.empty(stored.shape, np.uint8)
        for part in grid.slices_to_compute(box.size):
            values = self._matrix.to_float32(stored[part])
            factors = grid.factors_for_peaks(self._matrix.peaks_by_box(values, grid))
            boxes = values.reshape(len(factors), grid.rows, values.shape[1])
            spread = (factors.repeat(grid.columns, 1) if factors.shape[1] > 1 else factors)[:, None, :]
            scaled = boxes / spread if grid.by_division else boxes * spread
            quantized[part] = round_to_e4m3(scaled).reshape(values.shape)
        return quantized.reshape(-1).data, False


class Scales:
    """The recipe of the scales of a matrix, one per box of the grid."""

    def __init__(self, matrix: Matrix, grid: Grid) -> None:
        self.rows = matrix.box_rows_in_memory(grid)
        self.operands = (matrix.operand._replace(region=self._source_rows_of),)
        self._matrix, self._grid = matrix, grid

    def _source_rows_of(self, box: Box) -> Box:
        high = self._grid.rows
        return Box((box.start[0] * high, 0), (box.size[0] * high, self._matrix.columns))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the scales of some rows of boxes, in the dtype of the grid."""
        stored, grid = self._matrix.rows_as_bits(blocks[0]), self._grid
        scales = np.empty(box.size, np.float32)
        for rows, columns in grid.slices_to_compute(stored.shape):
            peaks = self._matrix.peaks_by_box(self._matrix.to_float32(stored[rows, columns]), grid)
            top, left = rows.start // grid.rows, columns.start // grid.columns
            factors = grid.factors_for_peaks(peaks)
            scales_of_part = factors if grid.by_division else np.float32(1) / factors
            scales[top : top + len(peaks), left : left + peaks.shape[1]] = scales_of_part
        if grid.dtype == _E8M0:
            exponents = scales.view(np.uint32) >> 23
            return exponents.astype(np.uint8).reshape(-1).data, False
        return round_to_bytes(scales, FLOAT32, grid.dtype), False
