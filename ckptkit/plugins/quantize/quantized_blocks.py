"""Quantize matrices, some rows at a time: numbers of 8 bits, and a scale for each box of them.

All is computed in float32, and each number is rounded once. Numbers and scales are two tensors, of which each is made
of the matrix by itself, in whatever order and by whichever process: it is read twice.
Sources: transformers/integrations/finegrained_fp8.py (`Fp8Quantize`), compressed_tensors/quantization/utils/helpers.py
(`calculate_qparams`) and lifecycle/forward_helpers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.engine.recipes import FLOAT32, Array, as_stored
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.casting import widener
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand
from ckptkit.layout.small_floats import LARGEST, to_e4m3

_PART = 1 << 18  # elements at a time, as in `casting`
_E8M0, _TINY = DTYPES["float8_e8m0fnu"], np.finfo(np.float32).tiny
_LEAST = {"bfloat16": 2.0**-7, "float32": 2.0**-23}  # the scale of numbers that are all 0


@dataclass(frozen=True, slots=True)
class Grid:
    """The boxes of a matrix that have one scale each: `rows` and `columns` of every box, which divide the matrix.

    Scales are stored as `dtype`. Either numbers are multiplied by what makes the largest of a box 448, of which the
    inverse is stored; or, `by_division`, they are divided by the scale as it is stored, whatever it was rounded to.
    A `dtype` of exponents alone makes each scale the next power of 2.
    """

    rows: int
    columns: int
    dtype: DType
    by_division: bool = False

    def factors(self, peaks: Array) -> Array:
        """Return what the numbers of each box are multiplied with, or divided by, given the largest of each.

        Of a box of zeros that is a number too, and of one that is too small for float32 to tell from that.
        """
        if self.by_division:
            scales = np.frombuffer(
                as_stored(peaks / np.float32(LARGEST), FLOAT32, self.dtype), f"u{self.dtype.itemsize}"
            )
            wide = widener(self.dtype)(scales).reshape(peaks.shape)
            return np.where(wide == 0, np.float32(_LEAST[self.dtype.name]), wide)
        with np.errstate(divide="ignore", over="ignore"):
            factors = np.float32(1) / peaks * np.float32(LARGEST)  # in two steps, as torch divides a number by a tensor
        factors = np.where(np.isfinite(factors), factors, np.float32(1))
        return np.float32(1) / next_powers(np.float32(1) / factors) if self.dtype == _E8M0 else factors

    def scales(self, factors: Array) -> Array:
        return factors if self.by_division else np.float32(1) / factors

    def stored(self, scales: Array) -> memoryview:
        """Return scales in the bytes of their dtype."""
        if self.dtype == _E8M0:
            exponents = np.ascontiguousarray(scales).view(np.uint32) >> 23
            return exponents.astype(np.uint8).reshape(-1).data
        return as_stored(scales, FLOAT32, self.dtype)

    def apply(self, values: Array, factors: Array) -> Array:
        """Return numbers, whole boxes of them, as they are before they are rounded."""
        spread = factors.repeat(self.columns, 1) if factors.shape[1] > 1 else factors
        boxes = values.reshape(len(factors), self.rows, values.shape[1])
        spread = spread[:, None, :]
        return boxes / spread if self.by_division else boxes * spread

    def parts(self, shape: Shape) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of parts of a matrix that are computed at once: whole boxes, one at least."""
        rows, columns = shape
        wide = self.columns * max(1, min(columns, _PART // self.rows) // self.columns)
        high = self.rows * max(1, _PART // wide // self.rows)
        for top in range(0, rows, high):
            for left in range(0, columns, wide):
                yield slice(top, min(top + high, rows)), slice(left, min(left + wide, columns))


def next_powers(scales: Array) -> Array:
    """Return the powers of 2 that scales are rounded up to, by logarithms in float32 as transformers has them."""
    logarithms = np.log2(np.maximum(scales, _TINY).astype(np.float64)).astype(np.float32)
    return np.exp2(np.ceil(logarithms))


class Matrix(NamedTuple):
    """The matrix that is quantized: where it is read from, in the dtype that it has there, and its rows and columns."""

    operand: Operand
    rows: int
    columns: int

    def bands_at_once(self, grid: Grid) -> int:
        """Return how many rows of boxes are at hand at once."""
        return max(1, BLOCK_BYTES // (grid.rows * self.columns * self.operand.dtype.itemsize))

    def elements(self, block: memoryview) -> Array:
        """Return rows of it, as they are stored."""
        return np.frombuffer(block, f"u{self.operand.dtype.itemsize}").reshape(-1, self.columns)

    def values(self, stored: Array) -> Array:
        """Return elements as float32."""
        wide = widener(self.operand.dtype)(stored)
        with np.errstate(over="ignore", invalid="ignore"):
            return wide.astype(np.float32, copy=False)

    def peaks(self, values: Array, grid: Grid) -> Array:
        """Return the largest magnitude in each box. Raises `Corrupt` for a number that is none, or has no end."""
        rows = np.maximum.reduce(np.abs(values).reshape(-1, grid.rows, values.shape[1]), axis=1)
        found: Array = np.maximum.reduce(rows.reshape(len(rows), -1, grid.columns), axis=2)
        if not np.isfinite(found).all():
            what = "NaN" if np.isnan(found).any() else "a number that is infinite or too large for float32"
            hint = "skip the tensor with --exclude-quantize; `ckptkit stats` lists all such tensors"
            raise Corrupt(f"cannot choose a scale: the tensor contains {what}", tensor=self.operand.name, hint=hint)
        return found


class Numbers:
    """The recipe of the numbers of a matrix, in 8 bits."""

    def __init__(self, matrix: Matrix, grid: Grid) -> None:
        self.rows = matrix.bands_at_once(grid) * grid.rows
        self.operands = (matrix.operand._replace(region=self._bands),)
        self._matrix, self._grid = matrix, grid

    def _bands(self, box: Box) -> Box:
        return Box((box.start[0], 0), (box.size[0], self._matrix.columns))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the numbers of some rows. Raises `Corrupt` for a matrix that holds what is none."""
        stored = self._matrix.elements(blocks[0])
        made = np.empty(stored.shape, np.uint8)
        for part in self._grid.parts(box.size):
            values = self._matrix.values(stored[part])
            factors = self._grid.factors(self._matrix.peaks(values, self._grid))
            made[part] = to_e4m3(self._grid.apply(values, factors)).reshape(values.shape)
        return made.reshape(-1).data, False


class Scales:
    """The recipe of the scales of a matrix, one for each box of the grid."""

    def __init__(self, matrix: Matrix, grid: Grid) -> None:
        self.rows = matrix.bands_at_once(grid)
        self.operands = (matrix.operand._replace(region=self._bands),)
        self._matrix, self._grid = matrix, grid

    def _bands(self, box: Box) -> Box:
        high = self._grid.rows
        return Box((box.start[0] * high, 0), (box.size[0] * high, self._matrix.columns))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the scales of some rows of boxes, in the dtype of the grid."""
        stored, grid = self._matrix.elements(blocks[0]), self._grid
        made = np.empty(box.size, np.float32)
        for rows, columns in grid.parts(stored.shape):
            peaks = self._matrix.peaks(self._matrix.values(stored[rows, columns]), grid)
            top, left = rows.start // grid.rows, columns.start // grid.columns
            made[top : top + len(peaks), left : left + peaks.shape[1]] = grid.scales(grid.factors(peaks))
        return grid.stored(made), False
