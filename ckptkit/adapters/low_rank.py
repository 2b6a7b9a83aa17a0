"""Compute low-rank changes, block by block: scaling * B A, in the ways in which layers store their weights.

The product is that of BLAS, whose sums of few terms have the same bits in blocks of any height but one row. Shapes and
formulas: peft/tuners/lora/layer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.engine.recipes import Array
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.plan import Operand


@dataclass(frozen=True)
class Product:
    """A change by the product of matrices B and A, of these shapes, times `scaling`."""

    a: Operand
    b: Operand
    shape_of_a: Shape
    shape_of_b: Shape
    scaling: float

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return A and B, with what a box of the weight needs of them."""
        return self.a._replace(region=self.of_a), self.b._replace(region=self.of_b)

    def of_a(self, box: Box) -> Box:
        """Return the box of A that a box of the weight needs."""
        raise NotImplementedError

    def of_b(self, box: Box) -> Box:
        raise NotImplementedError

    def delta(self, box: Box, a: Array, b: Array) -> Array:
        """Return the change of a box of the weight, in memory of its own."""
        raise NotImplementedError

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:  # noqa: ARG002
        """Return the elements with the change added."""
        delta = self.delta(box, *inputs)
        return np.add(values, delta, out=delta)


class LinearProduct(Product):
    """B `[out, r]` times A `[r, in]`, for a weight `[out, in]`; axes of a kernel may follow, of which B has 1 each."""

    def of_a(self, box: Box) -> Box:
        """Return the columns of A."""
        return Box((0, *box.start[1:]), (self.shape_of_a[0], *box.size[1:]))

    def of_b(self, box: Box) -> Box:
        kernel = (1,) * (len(box.size) - 2)
        return Box((box.start[0], *(0 for _ in self.shape_of_b[1:])), (box.size[0], self.shape_of_b[1], *kernel))

    def delta(self, box: Box, a: Array, b: Array) -> Array:
        """Return the change of a box of the weight."""
        return product(b.reshape(len(b), -1), a.reshape(len(a), -1), self.scaling).reshape(box.size)


class TransposedProduct(Product):
    """B `[out, r]` times A `[r, in]`, for a weight `[in, out]`: of an embedding, or of a layer that stores it so."""

    def of_a(self, box: Box) -> Box:
        """Return the columns of A that are the weight's rows."""
        return Box((0, box.start[0]), (self.shape_of_a[0], box.size[0]))

    def of_b(self, box: Box) -> Box:
        """Return the rows of B that are the weight's columns."""
        return Box((box.start[1], 0), (box.size[1], self.shape_of_b[1]))

    def delta(self, box: Box, a: Array, b: Array) -> Array:  # noqa: ARG002
        """Return the change of a box of the weight."""
        return product(b, a, self.scaling).T


@dataclass(frozen=True)
class ExpertsProduct(Product):
    """A product for each of `count` experts, for a weight `[E, out, in]`, or `[E, in, out]` if it is transposed.

    Row `e*r + k` of A `[r*E, in]` is of expert e, and so is column `k*E + e` of B `[out, r*E]`, or, if B is in blocks,
    column `e*r + k`.
    """

    count: int
    is_transposed: bool
    is_in_blocks: bool = False

    @property
    def rank(self) -> int:
        return self.shape_of_a[0] // self.count

    def of_a(self, box: Box) -> Box:
        """Return the rows of A of the box's experts, and the columns that it needs."""
        axis = 1 if self.is_transposed else 2
        return Box((box.start[0] * self.rank, box.start[axis]), (box.size[0] * self.rank, box.size[axis]))

    def of_b(self, box: Box) -> Box:  # noqa: ARG002
        """Return all of B: an expert's columns lie apart, and all is read but once."""
        return Box((0, 0), self.shape_of_b)

    def columns_of(self, expert: int) -> slice:
        """Return the columns of B that belong to an expert."""
        if self.is_in_blocks:
            return slice(expert * self.rank, (expert + 1) * self.rank)
        return slice(expert, None, self.count)

    def delta(self, box: Box, a: Array, b: Array) -> Array:
        """Return the change of a box of the weight."""
        axis = 2 if self.is_transposed else 1
        rows = slice(box.start[axis], box.stop[axis])
        found = np.empty(box.size, a.dtype)
        for i in range(box.size[0]):
            columns = self.columns_of(box.start[0] + i)
            one = product(np.ascontiguousarray(b[rows, columns]), a[i * self.rank :][: self.rank], self.scaling)
            found[i] = one.T if self.is_transposed else one
        return found


def product(b: Array, a: Array, scaling: float) -> Array:
    """Return `scaling * b @ a`. Raises `Corrupt` for factors that are no finite numbers."""
    for factor in (a, b):
        if not np.isfinite(factor).all():
            raise Corrupt("a matrix of the adapter has values that are infinite or NaN")
    if len(b) == 1:  # the product of a vector is another routine's, with other bits
        two: Array = product(np.repeat(b, 2, axis=0), a, scaling)
        return two[:1]
    found: Array = b @ a
    found *= found.dtype.type(scaling)
    return found
