"""Cut boxes into pieces of bounded size, and find where they lie in a strided chunk. Pure integers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product
from math import prod
from operator import mul, sub
from typing import NamedTuple

from ckptkit.layout.box import Box, Shape


def row_major(shape: Shape) -> Shape:
    """Return the strides, in elements, of a tensor whose elements lie in the order of their indices."""
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into blocks of at most `limit` elements: contiguous runs of its row-major order, in that order."""
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


def cut_rows(box: Box, rows: int) -> Iterator[Box]:
    """Cut a box into runs of so many of its rows, of which the last may have fewer."""
    for at in range(box.start[0], box.stop[0], rows):
        yield Box((at, *box.start[1:]), (min(rows, box.stop[0] - at), *box.size[1:]))


class Span(NamedTuple):
    """The elements of a strided chunk from the first to the last of a box: `start` and `length` in elements."""

    start: int
    length: int
    is_run: bool  # row-major, without other elements between


def span_of(box: Box, chunk: Box, strides: Shape | None) -> Span:
    """Return where the elements of `box` lie in `chunk`, which holds them by `strides` (row-major if None)."""
    steps = row_major(chunk.size) if strides is None else strides
    start = sum(map(mul, map(sub, box.start, chunk.start), steps))
    length = 1 + sum(map(mul, box.size, steps)) - sum(steps)
    return Span(start, length, strides is None and length == box.numel)


def halve(box: Box, strides: Shape) -> tuple[Box, Box]:
    """Cut a box in two across the axis along which its elements lie furthest apart."""
    axis = max(
        (d for d in range(len(box.size)) if box.size[d] > 1),
        key=lambda d: strides[d],
    )
    half = box.size[axis] // 2
    return _part(box, axis, 0, half), _part(box, axis, half, box.size[axis])


def _part(box: Box, axis: int, low: int, high: int) -> Box:
    start = (*box.start[:axis], box.start[axis] + low, *box.start[axis + 1 :])
    return Box(start, (*box.size[:axis], high - low, *box.size[axis + 1 :]))
