"""Apply low-rank and full weight updates to a tensor block by block, rounding once at the end.

Computes in float32, or in float64 for a tensor of that dtype. DoRA's formula is from peft/tuners/lora/dora.py and
peft/tuners/lora/variants.py; it uses the tensor as it was before any update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Protocol

import numpy as np

from ckptkit.engine.casting import widener
from ckptkit.engine.recipes import FLOAT32, FLOAT64, Array, Taken, round_to_bytes, working_dtype
from ckptkit.errors import Corrupt
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand, Recipe, Region, identity_region


# Low-rank updates: scaling * B A, for each way in which layers store their weights.
#
# BLAS returns the same bits for blocks of any height except one row, because the sums have few terms. Shapes
# and formulas: peft/tuners/lora/layer.py.
@dataclass(frozen=True)
class Product:
    """The update `scaling * B A` of a weight, for matrices of these shapes."""

    a: Operand
    b: Operand
    shape_of_a: Shape
    shape_of_b: Shape
    scaling: float

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return A and B, each with the region that a box of the weight needs."""
        return self.a._replace(region=self.box_of_a), self.b._replace(region=self.box_of_b)

    def box_of_a(self, box: Box) -> Box:
        """Return the box of A that a box of the weight needs."""
        raise NotImplementedError

    def box_of_b(self, box: Box) -> Box:
        raise NotImplementedError

    def delta(self, box: Box, a: Array, b: Array) -> Array:
        """Return the update of a box of the weight in a new array, which the caller may overwrite."""
        raise NotImplementedError

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:  # noqa: ARG002
        delta = self.delta(box, *inputs)
        return np.add(values, delta, out=delta)


class LinearProduct(Product):
    """The update of `[out, in, *kernel]`: B `[out, r]`, with kernel axes of size 1, times A `[r, in, *kernel]`."""

    def box_of_a(self, box: Box) -> Box:
        """Return the columns of A."""
        return Box((0, *box.start[1:]), (self.shape_of_a[0], *box.size[1:]))

    def box_of_b(self, box: Box) -> Box:
        kernel = (1,) * (len(box.size) - 2)
        return Box((box.start[0], *(0 for _ in self.shape_of_b[1:])), (box.size[0], self.shape_of_b[1], *kernel))

    def delta(self, box: Box, a: Array, b: Array) -> Array:
        return scaled_product(b.reshape(len(b), -1), a.reshape(len(a), -1), self.scaling).reshape(box.size)


class TransposedProduct(Product):
    """The update of a weight `[in, out]`, such as an embedding: (B `[out, r]` times A `[r, in]`) transposed."""

    def box_of_a(self, box: Box) -> Box:
        """Return the columns of A that are the weight's rows."""
        return Box((0, box.start[0]), (self.shape_of_a[0], box.size[0]))

    def box_of_b(self, box: Box) -> Box:
        """Return the rows of B that are the weight's columns."""
        return Box((box.start[1], 0), (box.size[1], self.shape_of_b[1]))

    def delta(self, box: Box, a: Array, b: Array) -> Array:  # noqa: ARG002
        return scaled_product(b, a, self.scaling).T


@dataclass(frozen=True)
class ExpertsProduct(Product):
    """One product per expert, for a weight `[E, out, in]`, or `[E, in, out]` if it is transposed.

    Row `e*r + k` of A `[r*E, in]` belongs to expert e. So does column `k*E + e` of B `[out, r*E]`, or column `e*r + k`
    if B is in blocks.
    """

    count: int
    is_transposed: bool
    is_in_blocks: bool = False

    @property
    def rank(self) -> int:
        return self.shape_of_a[0] // self.count

    def box_of_a(self, box: Box) -> Box:
        """Return the rows of A for the experts of the box, and the columns that it needs."""
        axis = 1 if self.is_transposed else 2
        return Box((box.start[0] * self.rank, box.start[axis]), (box.size[0] * self.rank, box.size[axis]))

    def box_of_b(self, box: Box) -> Box:  # noqa: ARG002
        """Return all of B: the columns of an expert are scattered, and B is read only once."""
        return Box((0, 0), self.shape_of_b)

    def delta(self, box: Box, a: Array, b: Array) -> Array:
        axis = 2 if self.is_transposed else 1
        rows = slice(box.start[axis], box.stop[axis])
        result = np.empty(box.size, a.dtype)
        for i in range(box.size[0]):
            expert = box.start[0] + i
            blocks = slice(expert * self.rank, (expert + 1) * self.rank)
            columns = blocks if self.is_in_blocks else slice(expert, None, self.count)
            update = scaled_product(
                np.ascontiguousarray(b[rows, columns]), a[i * self.rank :][: self.rank], self.scaling
            )
            result[i] = update.T if self.is_transposed else update
        return result


def not_finite_error(what: str) -> Corrupt:
    """Return the error for infinite or NaN values in an adapter: its training diverged."""
    hint = "run `ckptkit stats ADAPTER` to see which tensors have them, and pass an earlier adapter"
    return Corrupt(f"{what} of the adapter has values that are infinite or NaN", hint=hint)


def scaled_product(b: Array, a: Array, scaling: float) -> Array:
    """Return `scaling * b @ a`. Raises `Corrupt` for factors with infinite or NaN values."""
    for factor in (a, b):
        if not np.isfinite(factor).all():
            raise not_finite_error("a matrix")
    if len(b) == 1:  # BLAS multiplies a vector with another routine, whose bits differ
        two: Array = scaled_product(np.repeat(b, 2, axis=0), a, scaling)
        return two[:1]
    result: Array = b @ a
    result *= result.dtype.type(scaling)
    return result


_NUMPY = {FLOAT32: np.float32, FLOAT64: np.float64}


class ChangeStep(Protocol):
    """A weight update of a tensor, which is applied box by box."""

    @property
    def operands(self) -> Sequence[Operand]:
        """Return the tensors that the step reads."""

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:
        """Return the elements of `box` after this step.

        `values` are the elements after the steps before it, `base` the elements before any step, `inputs` the operands.
        Returns a new array or `values`; never writes to its arguments.
        """


class Merge:
    """The recipe of a tensor that several steps change one after the other.

    The initial tensor is read, or computed in float32 by a recipe of its own. `reach` returns the larger box that the
    steps need to update a box.
    """

    def __init__(self, base: Operand | Recipe, steps: Sequence[ChangeStep], reach: Region = identity_region) -> None:
        self._steps, self._reach = steps, reach
        self._base: Recipe = Taken(base) if isinstance(base, Operand) else base
        self._stored = base.dtype if isinstance(base, Operand) else FLOAT32
        operands = (*self._base.operands, *(operand for step in steps for operand in step.operands))
        self.operands = tuple(with_region_of_expanded_box(operand, reach) for operand in operands)

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box as `dtype`. Raises `Corrupt` for operands with infinite or NaN values."""
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
        return round_to_bytes(values[index], working_dtype(self._stored), dtype), False


@dataclass(frozen=True)
class DoraRescale:
    """DoRA: add a product, then rescale the weights of each output to the length in `magnitude`.

    The outputs are along `axis` of the weight. The magnitudes are a vector, possibly with extra axes of size 1.
    """

    product: Product
    magnitude: Operand
    shape_of_magnitude: Shape
    axis: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return *self.product.operands, self.magnitude._replace(region=self._box_of_magnitude)

    def _box_of_magnitude(self, box: Box) -> Box:
        outputs = max(range(len(self.shape_of_magnitude)), key=self.shape_of_magnitude.__getitem__)
        span = {outputs: (box.start[self.axis], box.size[self.axis])}
        pairs = [span.get(axis, (0, 1)) for axis in range(len(self.shape_of_magnitude))]
        return Box(tuple(start for start, _ in pairs), tuple(size for _, size in pairs))

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:
        """Return the rescaled elements. Raises `Corrupt` for an output without direction: its weights are all 0."""
        *factors, magnitude = inputs
        delta = self.product.delta(box, *factors)
        others = tuple(axis for axis in range(base.ndim) if axis != self.axis)
        lengths = np.sqrt(np.square(base + delta).sum(axis=others, keepdims=True))
        if not lengths.all():
            hint = "check that the adapter was trained on this base"
            raise Corrupt("all weights of an output are 0: DoRA cannot divide by their length", hint=hint)
        if not np.isfinite(magnitude).all():
            raise not_finite_error("a magnitude vector")
        result: Array = magnitude.reshape(lengths.shape) / lengths * (values + delta)
        return result


@dataclass(frozen=True)
class ScaledAddition:
    """The addition of `scaling` times a tensor of the same shape."""

    operand: Operand
    scaling: float

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.operand,)

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:  # noqa: ARG002
        (added,) = inputs
        if not np.isfinite(added).all():
            raise not_finite_error("a tensor")
        result: Array = values + added * added.dtype.type(self.scaling)
        return result


@dataclass(frozen=True)
class Rows:
    """The replacement of the rows at `indices` by the rows of another tensor."""

    operand: Operand
    indices: tuple[int, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.operand._replace(region=self._box_of_new_rows),)

    def _box_of_new_rows(self, box: Box) -> Box:
        return Box((0, *box.start[1:]), (len(self.indices), *box.size[1:]))

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:  # noqa: ARG002
        """Return the elements with the replaced rows; a copy only if the box contains any."""
        (rows,) = inputs
        replaced = [
            (i, row - box.start[0]) for i, row in enumerate(self.indices) if row in range(box.start[0], box.stop[0])
        ]
        if not replaced:
            return values
        changed = values.copy()
        changed[[row for _, row in replaced]] = rows[[i for i, _ in replaced]]
        return changed


@dataclass(frozen=True)
class SubBoxStep:
    """A step of a larger tensor, applied to a smaller tensor that is a box of it.

    The box begins at index `start` of the larger tensor and drops its leading axes of size 1.
    """

    step: ChangeStep
    start: Shape

    @property
    def operands(self) -> Sequence[Operand]:
        """Return the step's operands, with regions relative to the larger tensor."""
        return [with_region_of_expanded_box(operand, self._box_in_larger_tensor) for operand in self.step.operands]

    def _box_in_larger_tensor(self, box: Box) -> Box:
        more = (len(self.start) - len(box.start)) * (0,)
        return Box(tuple(map(add, self.start, more + box.start)), tuple(1 for _ in more) + box.size)

    def apply(self, values: Array, base: Array, box: Box, inputs: Sequence[Array]) -> Array:
        outer = self._box_in_larger_tensor(box)
        return self.step.apply(values.reshape(outer.size), base.reshape(outer.size), outer, inputs).reshape(box.size)


def with_region_of_expanded_box(operand: Operand, expand: Region) -> Operand:
    """Return an operand whose region for a box is the region for the expanded box `expand(box)`."""
    if expand is identity_region:
        return operand
    region = operand.region
    return operand._replace(region=lambda box: region(expand(box)))
