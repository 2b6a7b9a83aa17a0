"""Draw how the chunks of a tensor divide it, as rectangles of a unit square. Integers in, fractions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ckptkit.layout.box import Box, Shape


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of the unit square; by default the whole of it."""

    left: float = 0.0
    right: float = 1.0
    top: float = 0.0
    bottom: float = 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The rectangle of each box, in their order, and the axes that are cut. Flat ones are drawn by their bytes."""

    rectangles: tuple[Rectangle, ...]
    axes: tuple[int, ...] = ()
    is_flat: bool = False

    @property
    def is_grid(self) -> bool:
        """Return True if it is drawn along two axes."""
        return len(self.axes) == 2 and not self.is_flat


def cut(shape: Shape, boxes: Sequence[Box]) -> Cut:
    """Draw boxes that tile a tensor: along the axis that is cut, in the order of its bytes, or along two axes.

    Boxes cut along more axes than two lie side by side, each as wide as its share.
    """
    axes = tuple(axis for axis, extent in enumerate(shape) if any(box.size[axis] != extent for box in boxes))
    if not axes:
        return Cut((Rectangle(),) * len(boxes))
    if len(axes) == 1:
        return Cut(tuple(Rectangle(*span(box, shape, axes[0])) for box in boxes), axes)
    if all(is_run(box, shape) for box in boxes):
        return Cut(tuple(Rectangle(*run(box, shape)) for box in boxes), axes, is_flat=True)
    if len(axes) == 2:
        down, across = axes
        grid = tuple(Rectangle(*span(box, shape, across), *span(box, shape, down)) for box in boxes)
        return Cut(grid, axes)
    ends = list(accumulate(box.numel / prod(shape) for box in boxes))
    shares = zip([0.0, *ends], ends, strict=False)
    return Cut(tuple(Rectangle(left, right) for left, right in shares), axes)


def span(box: Box, shape: Shape, axis: int) -> tuple[float, float]:
    return box.start[axis] / shape[axis], (box.start[axis] + box.size[axis]) / shape[axis]


def is_run(box: Box, shape: Shape) -> bool:
    """Return True if the elements of a box follow one another in row-major order, as those of a flat shard do."""
    first = next((axis for axis, extent in enumerate(box.size) if extent != 1), len(shape))
    return box.size[first + 1 :] == shape[first + 1 :]


def run(box: Box, shape: Shape) -> tuple[float, float]:
    """Return the start and the end of a run's elements among all, in row-major order, as fractions."""
    start = sum(index * prod(shape[axis + 1 :]) for axis, index in enumerate(box.start))
    return start / prod(shape), (start + box.numel) / prod(shape)
