"""The steps that convert tensors of a family into tensors of the Hub, each with its inverse.

A step takes the tensors that one rule combines, and returns the tensors that they become. Steps compute no values: they
move chunks, with the functions in `ckptkit.layout.axes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from ckptkit.errors import Mismatch
from ckptkit.layout import StoredTensor, axes
from ckptkit.models.names.sizes import Sizes
from ckptkit.words import count

Tensors = tuple[StoredTensor, ...]


class TensorStep(Protocol):
    """A conversion of tensors and its inverse. Both raise `Mismatch` for shapes that do not fit."""

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors: ...

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors: ...


@dataclass(frozen=True, slots=True)
class Same:
    """The identity: only the names differ."""

    def to_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        return tensors

    from_hub = to_hub


@dataclass(frozen=True, slots=True)
class Chain:
    """Several steps, in the order from the family to the Hub."""

    steps: tuple[TensorStep, ...]

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        for step in self.steps:
            tensors = step.to_hub(tensors, sizes)
        return tensors

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Apply the inverses of all steps, the last one first."""
        for step in reversed(self.steps):
            tensors = step.from_hub(tensors, sizes)
        return tensors


@dataclass(frozen=True, slots=True)
class Rotary:
    """The order of rows in a head: rows that rotary embeddings rotate together are adjacent, on the Hub in two halves.

    Row `2i + c` of a head in the family is row `c * width / 2 + i` on the Hub. `heads` is the symbol for the number of
    heads in the rows. Source: transformers/models/llama/convert_llama_weights_to_hf.py, `permute`.
    """

    heads: str

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return each tensor with the first rows of all pairs of a head before the second rows."""
        return tuple(swap_row_axes(one, (*self.head_count_and_half_rows(one, sizes), 2)) for one in tensors)

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return each tensor with the rows of a head in pairs."""
        parts = ((one, *self.head_count_and_half_rows(one, sizes)) for one in tensors)
        return tuple(swap_row_axes(one, (heads, 2, half)) for one, heads, half in parts)

    def head_count_and_half_rows(self, tensor: StoredTensor, sizes: Sizes) -> tuple[int, int]:
        """Return the number of heads, and half the number of rows of each."""
        rows, heads, width = tensor.spec.shape[0], sizes[self.heads], sizes.head_width
        if rows != heads * width or width % 2:
            raise Mismatch(f"expected {heads} heads of {width} (config.json), found {rows} rows")
        return heads, width // 2


def swap_row_axes(tensor: StoredTensor, extents: tuple[int, int, int]) -> StoredTensor:
    """Return a tensor with its rows split into three axes, and the second and third of these swapped."""
    apart = axes.split_axis(tensor, 0, extents)
    return axes.merge_axes(axes.permute_axes(apart, (0, 2, 1, *range(3, len(apart.spec.shape)))), 0, 3)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Queries, keys and values: one tensor in the family, three tensors on the Hub.

    In the family's tensor, the rows of each key head are together: its queries, its key, its value.
    """

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        (fused,) = tensors
        groups, per_group, width = grouped_query_head_sizes(sizes)
        rows = fused.spec.shape[0]
        if rows != groups * (per_group + 2) * width:
            of = f"{count(groups, 'group')} of {per_group} + 2 heads of {width}"
            raise Mismatch(f"expected {of} (config.json), found {rows} rows")
        apart = axes.split_axis(fused, 0, (groups, per_group + 2, width))
        ends = ((0, per_group), (per_group, per_group + 1), (per_group + 1, per_group + 2))
        return tuple(axes.merge_axes(axes.narrow_axis(apart, 1, start, stop), 0, 3) for start, stop in ends)

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        groups, per_group, width = grouped_query_head_sizes(sizes)
        apart = [
            axes.split_axis(tensor, 0, (groups, heads, width))
            for tensor, heads in zip(tensors, (per_group, 1, 1), strict=True)
        ]
        return (axes.merge_axes(axes.concatenate(apart, 1), 0, 3),)


def grouped_query_head_sizes(sizes: Sizes) -> tuple[int, int, int]:
    """Return the number of key heads, the number of query heads for each, and the head width."""
    heads, groups = sizes["heads"], sizes["key_heads"]
    if heads % groups:
        raise Mismatch(f"expected key heads that divide {heads} heads (config.json), found {groups}")
    return groups, heads // groups, sizes.head_width


@dataclass(frozen=True, slots=True)
class Concatenated:
    """One tensor in the family that is several on the Hub, concatenated along an axis.

    All have the same extent, given by the symbol `size` or else by division. With `extents`, each has its own: "heads"
    and "key_heads" stand for the rows of so many heads.
    """

    count: int
    axis: int = 0
    extents: tuple[str, ...] = ()
    size: str = ""

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        (fused,) = tensors
        extent = fused.spec.shape[self.axis]
        if self.extents:
            extents = tuple(sizes[symbol] * sizes.head_width for symbol in self.extents)
        elif self.size:
            extents = (sizes[self.size],) * self.count
        elif extent % self.count:
            raise Mismatch(f"expected {self.count} equal parts along axis {self.axis}, found {extent} elements")
        else:
            extents = (extent // self.count,) * self.count
        ends = (0, *accumulate(extents))
        if ends[-1] != extent:
            raise Mismatch(f"expected {ends[-1]} (config.json), found {extent} along axis {self.axis}")
        return tuple(axes.narrow_axis(fused, self.axis, start, stop) for start, stop in pairwise(ends))

    def from_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        return (axes.concatenate(tensors, self.axis),)


@dataclass(frozen=True, slots=True)
class Alternating:
    """One tensor in the family that is several on the Hub, interleaved along an axis."""

    count: int
    axis: int = 0

    def to_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        (interleaved,) = tensors
        extent = interleaved.spec.shape[self.axis]
        if extent % self.count:
            what = f"elements of {self.count} tensors in turn along axis {self.axis}"
            raise Mismatch(f"expected {what}, found {extent} elements")
        apart = axes.split_axis(interleaved, self.axis, (extent // self.count, self.count))
        return tuple(axes.take_at_index(apart, self.axis + 1, i) for i in range(self.count))

    def from_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        apart = [axes.with_new_first_axis(tensor) for tensor in tensors]
        stacked = axes.concatenate(apart, 0)
        order = [*range(1, self.axis + 2), 0, *range(self.axis + 2, len(stacked.spec.shape))]
        return (axes.merge_axes(axes.permute_axes(stacked, order), self.axis, 2),)


@dataclass(frozen=True, slots=True)
class SwappedAxes:
    """A tensor with two axes swapped on the Hub."""

    axes: tuple[int, int] = (0, 1)

    def to_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        one, other = self.axes
        swapped = []
        for tensor in tensors:
            order = list(range(len(tensor.spec.shape)))
            order[one], order[other] = order[other], order[one]
            swapped.append(axes.permute_axes(tensor, order))
        return tuple(swapped)

    from_hub = to_hub


@dataclass(frozen=True, slots=True)
class Cropped:
    """A tensor that has padding rows at its end in the family, and does not have them on the Hub.

    `rows` is the symbol for the number of rows on the Hub. `from_hub` adds no padding: the family loads the tensor
    without.
    """

    rows: str

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        """Return each tensor without its padding rows; a tensor with fewer rows is unchanged."""
        return tuple(axes.narrow_axis(one, 0, 0, min(sizes[self.rows], one.spec.shape[0])) for one in tensors)

    def from_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        return tensors


@dataclass(frozen=True, slots=True)
class FlatFront:
    """A tensor with one axis in the family and two on the Hub: the items that a symbol counts, and their rows."""

    symbol: str

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        items, split = sizes[self.symbol], []
        for tensor in tensors:
            rows = tensor.spec.shape[0]
            if rows % items:
                raise Mismatch(f"expected a multiple of {items} rows (number of {self.symbol}), found {rows}")
            split.append(axes.split_axis(tensor, 0, (items, rows // items)))
        return tuple(split)

    def from_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:  # noqa: ARG002 - the others have use for it
        return tuple(axes.merge_axes(tensor, 0, 2) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class RequiredExtent:
    """The identity, with a check: raises `Mismatch` unless an axis has the extent that a symbol stands for.

    The check detects a matrix that an older version of the family saved transposed.
    """

    axis: int
    symbol: str

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        for tensor in tensors:
            shape, wanted = tensor.spec.shape, sizes[self.symbol]
            if len(shape) <= self.axis or shape[self.axis] != wanted:
                size = f"{wanted} along axis {self.axis} (the {self.symbol} size in config.json)"
                raise Mismatch(f"expected {size}, found shape {list(shape)}")
        return tensors

    from_hub = to_hub


@dataclass(frozen=True, slots=True)
class Each:
    """One step for each of several tensors."""

    steps: tuple[TensorStep, ...]

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        pairs = zip(self.steps, tensors, strict=True)
        return tuple(one for step, tensor in pairs for one in step.to_hub((tensor,), sizes))

    def from_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        pairs = zip(self.steps, tensors, strict=True)
        return tuple(one for step, tensor in pairs for one in step.from_hub((tensor,), sizes))


@dataclass(frozen=True, slots=True)
class Reversed:
    """A step in the other direction: its inverse leads to the Hub."""

    step: TensorStep

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        return self.step.from_hub(tensors, sizes)

    def from_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        return self.step.to_hub(tensors, sizes)
