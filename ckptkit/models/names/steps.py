"""The steps that turn tensors of a family into tensors of the Hub, each with its inverse.

A step is given the tensors that one rule brings together and returns those that they become. Nothing is computed:
chunks move, by the arithmetic in `ckptkit.layout.axes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from ckptkit.errors import Mismatch
from ckptkit.layout import StoredTensor, axes
from ckptkit.layout.box import Shape
from ckptkit.models.names.sizes import Sizes
from ckptkit.words import count

Tensors = tuple[StoredTensor, ...]


class TensorStep(Protocol):
    """A change of tensors, and the change that undoes it. Both raise `Mismatch` for shapes that do not fit."""

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors: ...

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return the tensors as they are in the family."""
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """No change: only the names differ."""

    def to_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        return tensors

    from_hub = to_hub


@dataclass(frozen=True, slots=True)
class Chain:
    """Several steps, in the order that leads to the Hub."""

    steps: tuple[TensorStep, ...]

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Take each step."""
        for step in self.steps:
            tensors = step.to_hub(tensors, sizes)
        return tensors

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Take each step back, the last one first."""
        for step in reversed(self.steps):
            tensors = step.from_hub(tensors, sizes)
        return tensors


@dataclass(frozen=True, slots=True)
class Rotary:
    """The order of a head's rows: pairs that rotary embeddings turn lie together in the family, in halves on the Hub.

    Row `2i + c` of a head in the family is row `c * width / 2 + i` of it on the Hub. `heads` is the symbol for how many
    heads the rows are of. Source: transformers/models/llama/convert_llama_weights_to_hf.py, `permute`.
    """

    heads: str

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return each with the first rows of all pairs of a head before the second ones."""
        return tuple(exchange_rows(one, (*self.of(one, sizes), 2)) for one in tensors)

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return each with the rows of a head in pairs."""
        found = []
        for one in tensors:
            heads, half = self.of(one, sizes)
            found.append(exchange_rows(one, (heads, 2, half)))
        return tuple(found)

    def of(self, tensor: StoredTensor, sizes: Sizes) -> tuple[int, int]:
        """Return how many heads the rows are of, and half the rows of each."""
        rows, heads, width = tensor.spec.shape[0], sizes[self.heads], sizes.head_width
        if rows != heads * width or width % 2:
            raise Mismatch(f"expected {heads} heads of {width} (config.json), found {rows} rows")
        return heads, width // 2


def exchange_rows(tensor: StoredTensor, extents: tuple[int, int, int]) -> StoredTensor:
    """Return a tensor whose rows are split in three axes, with the second and the third of these exchanged."""
    apart = axes.split(tensor, 0, extents)
    return axes.merge(axes.permute(apart, (0, 2, 1, *range(3, len(apart.spec.shape)))), 0, 3)


@dataclass(frozen=True, slots=True)
class Grouped:
    """One tensor in which each key head has the rows of its queries, of its key and of its value; three on the Hub."""

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return queries, keys and values."""
        (fused,) = tensors
        groups, per_group, width = group(sizes)
        rows = fused.spec.shape[0]
        if rows != groups * (per_group + 2) * width:
            of = f"{count(groups, 'group')} of {per_group} + 2 heads of {width}"
            raise Mismatch(f"expected {of} (config.json), found {rows} rows")
        apart = axes.split(fused, 0, (groups, per_group + 2, width))
        ends = ((0, per_group), (per_group, per_group + 1), (per_group + 1, per_group + 2))
        return tuple(axes.merge(axes.cut(apart, 1, start, stop), 0, 3) for start, stop in ends)

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return the one tensor of three."""
        groups, per_group, width = group(sizes)
        apart = [
            axes.split(tensor, 0, (groups, heads, width))
            for tensor, heads in zip(tensors, (per_group, 1, 1), strict=True)
        ]
        return (axes.merge(axes.concatenate(apart, 1), 0, 3),)


def group(sizes: Sizes) -> tuple[int, int, int]:
    """Return how many key heads there are, the query heads of each, and their width."""
    heads, groups = sizes["heads"], sizes["key_heads"]
    if heads % groups:
        raise Mismatch(f"expected key heads that divide {heads} heads (config.json), found {groups}")
    return groups, heads // groups, sizes.head_width


@dataclass(frozen=True, slots=True)
class Concatenated:
    """One tensor in the family that is several on the Hub, which follow each other along an axis.

    They are of one extent, which is the number that `size` stands for if it is given; or of those that `extents` gives:
    "heads" and "key_heads" are so many heads' rows.
    """

    count: int
    axis: int = 0
    extents: tuple[str, ...] = ()
    size: str = ""

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        """Return the tensors that the one is joined of."""
        (whole,) = tensors
        ends = (0, *accumulate(self.of(whole.spec.shape[self.axis], sizes)))
        if ends[-1] != whole.spec.shape[self.axis]:
            found = f"found {whole.spec.shape[self.axis]} along axis {self.axis}"
            raise Mismatch(f"expected {ends[-1]} (config.json), {found}")
        return tuple(axes.cut(whole, self.axis, start, stop) for start, stop in pairwise(ends))

    def from_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        return (axes.concatenate(tensors, self.axis),)

    def of(self, extent: int, sizes: Sizes) -> Shape:
        """Return the extent of each."""
        if self.extents:
            return tuple(sizes[symbol] * sizes.head_width for symbol in self.extents)
        if self.size:
            return (sizes[self.size],) * self.count
        if extent % self.count:
            raise Mismatch(f"expected {self.count} equal parts along axis {self.axis}, found {extent} elements")
        return (extent // self.count,) * self.count


@dataclass(frozen=True, slots=True)
class Alternating:
    """One tensor in the family that is several on the Hub, whose elements along an axis come in turn."""

    count: int
    axis: int = 0

    def to_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        """Return the tensors whose elements come in turn."""
        (whole,) = tensors
        extent = whole.spec.shape[self.axis]
        if extent % self.count:
            raise Mismatch(
                f"expected elements of {self.count} tensors in turn along axis {self.axis}, found {extent} elements"
            )
        apart = axes.split(whole, self.axis, (extent // self.count, self.count))
        return tuple(axes.take(apart, self.axis + 1, i) for i in range(self.count))

    def from_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        """Return the one tensor of several."""
        apart = [axes.insert(tensor) for tensor in tensors]
        stacked = axes.concatenate(apart, 0)
        order = [*range(1, self.axis + 2), 0, *range(self.axis + 2, len(stacked.spec.shape))]
        return (axes.merge(axes.permute(stacked, order), self.axis, 2),)


@dataclass(frozen=True, slots=True)
class SwappedAxes:
    """A tensor two of whose axes are the other way round on the Hub."""

    axes: tuple[int, int] = (0, 1)

    def to_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        return tuple(axes.permute(tensor, self.order(len(tensor.spec.shape))) for tensor in tensors)

    from_hub = to_hub

    def order(self, ndim: int) -> Sequence[int]:
        """Return the order of `ndim` axes."""
        order = list(range(ndim))
        one, other = self.axes
        order[one], order[other] = order[other], order[one]
        return order


@dataclass(frozen=True, slots=True)
class Cropped:
    """A tensor with more rows than on the Hub, behind those that it has there: they pad it.

    `rows` is the symbol for how many there are on the Hub. None are put back: the family loads it without.
    """

    rows: str

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        """Return each without the rows that pad it; one with less rows as it is."""
        return tuple(axes.cut(one, 0, 0, min(sizes[self.rows], one.spec.shape[0])) for one in tensors)

    def from_hub(self, tensors: Tensors, _sizes: Sizes, /) -> Tensors:
        """Return each as it is."""
        return tensors


@dataclass(frozen=True, slots=True)
class FlatFront:
    """A tensor that is flat in the family, and on the Hub has an axis for as many things as a symbol stands for."""

    symbol: str

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        """Return each with an axis in front."""
        return tuple(axes.split(tensor, 0, self.of(tensor, sizes)) for tensor in tensors)

    def from_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:  # noqa: ARG002 - the others have use for it
        """Return each with its first two axes as one."""
        return tuple(axes.merge(tensor, 0, 2) for tensor in tensors)

    def of(self, tensor: StoredTensor, sizes: Sizes) -> tuple[int, int]:
        """Return the extents that the first axis is split in."""
        count, extent = sizes[self.symbol], tensor.spec.shape[0]
        if extent % count:
            raise Mismatch(f"expected rows of {count} {self.symbol}, found {extent} rows")
        return count, extent // count


@dataclass(frozen=True, slots=True)
class RequiredExtent:
    """No change of tensors whose extent along an axis is in the family what a symbol stands for, and else an error.

    It tells a matrix from the same the other way round, as an older version may have had it.
    """

    axis: int
    symbol: str

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        """Return the tensors."""
        for tensor in tensors:
            shape, wanted = tensor.spec.shape, sizes[self.symbol]
            if len(shape) <= self.axis or shape[self.axis] != wanted:
                size = f"{wanted} along axis {self.axis} (the {self.symbol} size in config.json)"
                raise Mismatch(f"expected {size}, found shape {list(shape)}")
        return tensors

    from_hub = to_hub


@dataclass(frozen=True, slots=True)
class Each:
    """A step for each of several tensors."""

    steps: tuple[TensorStep, ...]

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        pairs = zip(self.steps, tensors, strict=True)
        return tuple(one for step, tensor in pairs for one in step.to_hub((tensor,), sizes))

    def from_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        """Take the step of each back."""
        pairs = zip(self.steps, tensors, strict=True)
        return tuple(one for step, tensor in pairs for one in step.from_hub((tensor,), sizes))


@dataclass(frozen=True, slots=True)
class Reversed:
    """A step the other way: what it makes of the Hub's tensors is made of the family's."""

    step: TensorStep

    def to_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        """Take the step back."""
        return self.step.from_hub(tensors, sizes)

    def from_hub(self, tensors: Tensors, sizes: Sizes) -> Tensors:
        return self.step.to_hub(tensors, sizes)
