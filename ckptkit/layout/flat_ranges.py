"""Cut a range of a flattened tensor into boxes, each of which is one run of elements. Integers only; knows no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckptkit.layout.box import Box, Shape


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of elements `start:stop` of a tensor of `shape`, flattened row by row, and where each begins.

    At most `2 * ndim - 1` boxes; each begins so many elements behind `start`, and is contiguous from there. Of a matrix
    they are the end of a row, whole rows, and the beginning of a row.
    """
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]  # elements from one index of an axis to the next
    at = start
    while at < stop and shape:
        axis = next(axis for axis, step in enumerate(steps) if at % step == 0 and at + step <= stop)
        index = tuple(at // step % extent for step, extent in zip(steps, shape, strict=True))
        count = min(shape[axis] - index[axis], (stop - at) // steps[axis])
        yield Box(index, ((1,) * axis + (count,) + shape[axis + 1 :])), at - start
        at += count * steps[axis]
    if not shape and start < stop:
        yield Box((), ()), 0
