"""Merge changes into the tensors that they are of, block by block, and round once: low-rank changes, and whole ones.

All is computed in float32, or in float64 for a tensor of that dtype. Source of DoRA's formula:
peft/tuners/lora/dora.py and peft/tuners/lora/variants.py; it is of the tensor as it was before any change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Protocol

import numpy as np

from ckptkit.engine.recipes import FLOAT32, FLOAT64, Array, Taken, as_stored, working_dtype
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.casting import widener
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand, Recipe, Region, same


# Compute low-rank changes, block by block: scaling * B A, in the ways in which layers store their weights.
#
# The product is that of BLAS, whose sums of few terms have the same bits in blocks of any height but one row. Shapes
# and formulas: peft/tuners/lora/layer.py.
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


_NUMPY = {FLOAT32: np.float32, FLOAT64: np.float64}


class ChangeStep(Protocol):
    """A change of a tensor, which is made box by box."""

    @property
    def operands(self) -> Sequence[Operand]:
        """Return the tensors that it takes."""

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:
        """Return the elements of `box` changed, given those of the tensor as it was at first, and of the operands.

        The result is another array, or `values`; what is given is not written over.
        """


class Merge:
    """The recipe of a tensor that is another after some steps, one after the other.

    What it is at first is read, or computed in float32 by a recipe of its own. Where a step needs more of the tensor
    than the box that is to be changed, `reach` says what.
    """

    def __init__(self, base: Operand | Recipe, steps: Sequence[ChangeStep], reach: Region = same) -> None:
        self._steps, self._reach = steps, reach
        self._base: Recipe = Taken(base) if isinstance(base, Operand) else base
        self._stored = base.dtype if isinstance(base, Operand) else FLOAT32
        operands = (*self._base.operands, *(operand for step in steps for operand in step.operands))
        self.operands = tuple(with_expanded_region(operand, reach) for operand in operands)

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`. Raises `Corrupt` for operands that are no finite numbers."""
        outer, taken = self._reach(box), len(self._base.operands)
        inputs = [
            np.frombuffer(block, _NUMPY[operand.dtype]).reshape(operand.region(box).size)
            for operand, block in zip(self.operands[taken:], blocks[taken:], strict=True)
        ]
        stored, _ = self._base(outer, self._stored, blocks[:taken])
        values = base = widener(self._stored)(np.frombuffer(stored, f"u{self._stored.itemsize}")).reshape(outer.size)
        taken = 0
        for step in self._steps:
            count = len(step.operands)
            values = step.apply(values, base, outer, inputs[taken : taken + count])
            taken += count
        part = box.relative_to(outer)
        index = tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))
        return as_stored(values[index], working_dtype(self._stored), dtype), False


@dataclass(frozen=True)
class DoraRescale:
    """DoRA: after a product is added, the weights of each output are scaled to the length that `magnitude` gives.

    Outputs lie along `axis` of the weight. The magnitudes are a vector, or one with axes of 1 around it.
    """

    product: Product
    magnitude: Operand
    shape_of_magnitude: Shape
    axis: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the operands of the product, and the magnitudes."""
        return *self.product.operands, self.magnitude._replace(region=self._of_magnitude)

    def _of_magnitude(self, box: Box) -> Box:
        outputs = max(range(len(self.shape_of_magnitude)), key=self.shape_of_magnitude.__getitem__)
        span = {outputs: (box.start[self.axis], box.size[self.axis])}
        pairs = [span.get(axis, (0, 1)) for axis in range(len(self.shape_of_magnitude))]
        return Box(tuple(start for start, _ in pairs), tuple(size for _, size in pairs))

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:
        """Return the elements changed. Raises `Corrupt` for an output with weights of 0: they have no length."""
        *factors, magnitude = inputs
        delta = self.product.delta(box, *factors)
        others = tuple(axis for axis in range(base.ndim) if axis != self.axis)
        lengths = np.sqrt(np.square(base + delta).sum(axis=others, keepdims=True))
        if not (lengths.all() and np.isfinite(magnitude).all()):
            raise Corrupt("weights of length 0, or magnitudes that are infinite or NaN: DoRA cannot divide by them")
        result: Array = magnitude.reshape(lengths.shape) / lengths * (values + delta)
        return result


@dataclass(frozen=True)
class ScaledAddition:
    """The addition of a tensor of the same shape, times `scaling`."""

    operand: Operand
    scaling: float

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the tensor."""
        return (self.operand,)

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:  # noqa: ARG002
        """Return the elements with those of the tensor added."""
        (added,) = inputs
        if not np.isfinite(added).all():
            raise Corrupt("a tensor of the adapter has values that are infinite or NaN")
        result: Array = values + added * added.dtype.type(self.scaling)
        return result


@dataclass(frozen=True)
class Rows:
    """The replacement of some rows, given by their indices, by those of another tensor."""

    operand: Operand
    indices: tuple[int, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the tensor that has the new rows."""
        return (self.operand._replace(region=self._columns),)

    def _columns(self, box: Box) -> Box:
        return Box((0, *box.start[1:]), (len(self.indices), *box.size[1:]))

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:  # noqa: ARG002
        """Return the elements with those of the new rows in their places."""
        (rows,) = inputs
        found = [
            (i, row - box.start[0]) for i, row in enumerate(self.indices) if row in range(box.start[0], box.stop[0])
        ]
        if not found:
            return values
        changed = values.copy()
        changed[[row for _, row in found]] = rows[[i for i, _ in found]]
        return changed


@dataclass(frozen=True)
class SubBoxStep:
    """A step of a tensor of which another is a box, without leading axes of one element: a change of that other.

    The box begins at index `start`.
    """

    step: ChangeStep
    start: Shape

    @property
    def operands(self) -> Sequence[Operand]:
        """Return those of the step, with what a box needs at its place."""
        return [with_expanded_region(operand, self._there) for operand in self.step.operands]

    def _there(self, box: Box) -> Box:
        more = (len(self.start) - len(box.start)) * (0,)
        return Box(tuple(map(add, self.start, more + box.start)), tuple(1 for _ in more) + box.size)

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:
        """Return the elements changed."""
        there = self._there(box)
        return self.step.apply(values.reshape(there.size), base.reshape(there.size), there, inputs).reshape(box.size)


def with_expanded_region(operand: Operand, reach: Region) -> Operand:
    """Return an operand of which what is needed for a box is what is needed for all that is at hand with it."""
    if reach is same:
        return operand
    region = operand.region
    return operand._replace(region=lambda box: region(reach(box)))
