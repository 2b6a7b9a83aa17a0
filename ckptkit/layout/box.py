"""Compute with boxes, the rectangular regions of a tensor's index space, and cut them. Integer arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from operator import add, itemgetter, le, mul, sub
from typing import NamedTuple


def row_major_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of a contiguous row-major tensor."""
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into blocks of at most `limit` elements: contiguous ranges of its row-major order, in that order."""
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    axis = next(d for d in range(len(box.size)) if prod(box.size[d + 1 :]) <= limit)
    rows = max(1, limit // prod(box.size[axis + 1 :]))
    for corner in product(*(range(a, a + n) for a, n in zip(box.start[:axis], box.size[:axis], strict=True))):
        for at in range(box.start[axis], box.stop[axis], rows):
            count = min(rows, box.stop[axis] - at)
            yield Box((*corner, at, *box.start[axis + 1 :]), (*(1 for _ in corner), count, *box.size[axis + 1 :]))


def cut_rows(box: Box, rows_per_block: int) -> Iterator[Box]:
    """Cut a box into blocks of `rows_per_block` rows. The last may have fewer."""
    for at in range(box.start[0], box.stop[0], rows_per_block):
        yield Box((at, *box.start[1:]), (min(rows_per_block, box.stop[0] - at), *box.size[1:]))


class Span(NamedTuple):
    """The elements of a strided chunk from a box's first element to its last: `start` and `length` in elements."""

    start: int
    length: int
    is_run: bool  # row-major, without other elements in between


def span_of(box: Box, chunk_box: Box, strides: Shape | None) -> Span:
    """Return the span of the elements of `box` in `chunk_box`, which has `strides` (row-major if None)."""
    steps = row_major_strides(chunk_box.size) if strides is None else strides
    start = sum(map(mul, map(sub, box.start, chunk_box.start), steps))
    length = 1 + sum(map(mul, box.size, steps)) - sum(steps)
    return Span(start, length, strides is None and length == box.numel)


def halve_box(box: Box, strides: Shape) -> tuple[Box, Box]:
    """Cut a box in two across the axis with the largest stride."""
    axis = max((d for d in range(len(box.size)) if box.size[d] > 1), key=lambda d: strides[d])
    half = box.size[axis] // 2
    return _slice_axis(box, axis, 0, half), _slice_axis(box, axis, half, box.size[axis])


def _slice_axis(box: Box, axis: int, low: int, high: int) -> Box:
    start = (*box.start[:axis], box.start[axis] + low, *box.start[axis + 1 :])
    return Box(start, (*box.size[:axis], high - low, *box.size[axis + 1 :]))


Shape = tuple[int, ...]


class Box(NamedTuple):
    """The elements `start[d] <= index[d] < start[d] + size[d]` for every axis `d`. Without axes: one element."""

    start: Shape
    size: Shape

    @property
    def stop(self) -> Shape:
        """Return the first index past the box on every axis."""
        return tuple(map(add, self.start, self.size))

    @property
    def numel(self) -> int:
        return prod(self.size)

    def relative_to(self, outer: Box) -> Box:
        """Return the same elements, with indices relative to the first corner of `outer`."""
        return Box(tuple(map(sub, self.start, outer.start)), self.size)


def full_box(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements in both boxes, or None if the boxes are disjoint."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(map(sub, map(min, a.stop, b.stop), start))
    return Box(start, size) if min(size, default=1) > 0 else None


class BoxIndex:
    """An index of many boxes, which finds the boxes that intersect a given one without testing all of them.

    Boxes are sorted along the axis on which they differ most. `furthest[i]` is the largest stop among the first `i + 1`
    boxes, so a query takes two bisections and a scan of the boxes in between. If the query covers the extent of all
    boxes on every other axis (`across`), as with shards, one comparison proves that a box is inside it. Empty boxes
    intersect nothing.
    """

    __slots__ = ("_across", "_axis", "_boxes", "_furthest", "_order", "_starts")

    def __init__(self, boxes: Sequence[Box]) -> None:
        ndim = len(boxes[0].start) if boxes else 0
        self._boxes = boxes
        starts, sizes = starts_and_sizes_by_axis(boxes, ndim)
        self._axis = max(range(ndim), key=lambda axis: len(set(starts[axis])), default=None)
        if self._axis is None:
            return
        start, size = starts[self._axis], sizes[self._axis]
        self._order = sorted((i for i, box in enumerate(boxes) if all(box.size)), key=start.__getitem__)
        self._starts = [start[i] for i in self._order]
        self._furthest = list(accumulate((start[i] + size[i] for i in self._order), max))
        others = [axis for axis in range(ndim) if axis != self._axis]
        self._across = [(axis, min(starts[axis]), max(map(add, starts[axis], sizes[axis]))) for axis in others]

    @property
    def is_stacked(self) -> bool:
        """Return True if the boxes follow each other along an axis, as shards do. Then no two of them overlap."""
        return self._axis is not None and all(map(le, self._furthest, self._starts[1:]))

    def intersections_with(self, region: Box) -> Iterator[tuple[int, Box]]:
        """Yield the index of each box that intersects `region`, with the intersection, in order of start."""
        if self._axis is None:
            yield from enumerate(self._boxes)
            return
        axis, stop = self._axis, region.stop
        low, high = region.start[axis], stop[axis]
        is_across = all(region.start[d] <= start and end <= stop[d] for d, start, end in self._across)
        for i in self._order[bisect_left(self._furthest, low + 1) : bisect_left(self._starts, high)]:
            box = self._boxes[i]
            if is_across and box.start[axis] >= low and box.start[axis] + box.size[axis] <= high:
                yield i, box
            elif (shared := intersect(box, region)) is not None:
                yield i, shared


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int, Box] | None:
    """Return the indices of two boxes that overlap, and the overlap; None if no two do. Empty boxes never do."""
    index = BoxIndex(boxes)
    if index.is_stacked:
        return None
    for i, box in enumerate(boxes):
        for j, shared in index.intersections_with(box):
            if i != j:
                return i, j, shared
    return None


def find_box_outside(shape: Shape, boxes: Sequence[Box]) -> int | None:
    """Return the index of a box that is not inside a tensor of `shape`; None if all are."""
    for i, (start, size) in enumerate(boxes):
        if not len(start) == len(size) == len(shape):
            return i
    for starts, sizes, extent in zip(*starts_and_sizes_by_axis(boxes, len(shape)), shape, strict=True):
        if boxes and (min(starts) < 0 or min(sizes) < 0 or max(map(add, starts, sizes)) > extent):
            ends = zip(starts, sizes, strict=True)
            return next(i for i, (a, n) in enumerate(ends) if a < 0 or n < 0 or a + n > extent)
    return None


def starts_and_sizes_by_axis(boxes: Sequence[Box], ndim: int) -> tuple[list[list[int]], list[list[int]]]:
    starts, sizes = [box.start for box in boxes], [box.size for box in boxes]
    axes = [itemgetter(axis) for axis in range(ndim)]
    return [list(map(axis, starts)) for axis in axes], [list(map(axis, sizes)) for axis in axes]


def find_slab_with_gap(shape: Shape, boxes: Sequence[Box]) -> tuple[int, int, int] | None:
    """Return where disjoint boxes leave a tensor of `shape` uncovered: `(axis, start, stop)` of a slab with a gap.

    Compares, slab by slab along each axis, how many elements of a cross-section are covered.
    """
    if sum(box.numel for box in boxes) == prod(shape):
        return None
    for axis, extent in enumerate(shape):
        section = prod(shape) // extent
        change: dict[int, int] = {0: 0, extent: 0}
        for box in boxes:
            if box.numel:
                area = box.numel // box.size[axis]
                change[box.start[axis]] = change.get(box.start[axis], 0) + area
                stop = box.start[axis] + box.size[axis]
                change[stop] = change.get(stop, 0) - area
        cuts = sorted(change)
        covered = accumulate(change[cut] for cut in cuts)
        holes = [(a, b) for a, b, area in zip(cuts, cuts[1:], covered, strict=False) if area != section]
        if holes and holes != [(0, extent)]:
            return axis, holes[0][0], holes[0][1]
    return (0, 0, shape[0]) if shape else (0, 0, 1)


def subtract_boxes(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that cover a box without the others."""
    remaining = [box]
    for other in others:
        remaining = [part for box_left in remaining for part in boxes_around(box_left, other)]
    return remaining


def boxes_around(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint boxes that cover a box without `hole`: along each axis the parts before and after it."""
    shared = intersect(box, hole)
    if shared is None:
        yield box
        return
    start, stop = list(box.start), list(box.stop)
    for axis, (low, high) in enumerate(zip(shared.start, shared.stop, strict=True)):
        for begin, end in ((start[axis], low), (high, stop[axis])):
            if begin < end:
                corner = (*start[:axis], begin, *start[axis + 1 :])
                far = (*stop[:axis], end, *stop[axis + 1 :])
                yield Box(corner, tuple(map(sub, far, corner)))
        start[axis], stop[axis] = low, high
