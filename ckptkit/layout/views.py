"""Index a tensor: compute the selected box and the remaining axes. Integer arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index as as_integer
from types import EllipsisType
from typing import Self

from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.words import count

Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class View:
    """A box of a tensor, and the axes that remain: an axis indexed by an integer is dropped."""

    box: Box
    axes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Shape) -> Self:
        return cls(full_box(shape), tuple(range(len(shape))))

    @property
    def shape(self) -> Shape:
        """Return the size along the remaining axes."""
        return tuple(self.box.size[axis] for axis in self.axes)

    def indexed_by(self, index: Index | tuple[Index, ...]) -> View:
        """Return the view that numpy would give for `[index]`, of integers, slices without a step, and one ellipsis.

        Raises IndexError for an index that is out of range or one too many, TypeError for an index of another kind, and
        ValueError for a slice with a step.
        """
        start, size, kept = list(self.box.start), list(self.box.size), list(self.axes)
        for axis, item in zip(self.axes, self._index_per_axis(index), strict=True):
            extent = size[axis]
            if isinstance(item, slice):
                low, high, step = item.indices(extent)
                if step != 1:
                    raise ValueError(f"a slice with step {step}: read without a step, then take every {step}th element")
                start[axis], size[axis] = start[axis] + low, max(0, high - low)
            else:
                at = as_integer(item)
                if not -extent <= at < extent:
                    raise IndexError(f"index {at} is out of range for axis {axis} of size {extent}")
                start[axis], size[axis] = start[axis] + at % extent, 1
                kept.remove(axis)
        return View(Box(tuple(start), tuple(size)), tuple(kept))

    def _index_per_axis(self, index: Index | tuple[Index, ...]) -> list[int | slice]:
        given = index if isinstance(index, tuple) else (index,)
        for item in given:
            if isinstance(item, bool) or not (isinstance(item, slice | EllipsisType) or hasattr(item, "__index__")):
                raise TypeError(f"expected integers and slices as the index of a tensor on disk, found {item!r}")
        dots = sum(item is ... for item in given)
        spare = len(self.axes) - len(given) + dots
        if spare < 0 or dots > 1:
            raise IndexError(
                f"expected at most {count(len(self.axes), 'index')} and one ellipsis, found "
                f"{count(len(given) - dots, 'index')} and {dots} ellipses"
            )
        filled: list[int | slice] = []
        for item in given if dots else (*given, ...):
            if isinstance(item, EllipsisType):
                filled += [slice(None)] * spare
            else:
                filled.append(item)
        return filled
