"""Random shapes, boxes and tilings for hypothesis: small enough to count every element of."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.layout.box import Box, Shape, full_box

Draw = st.DrawFn

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: Draw, shape: Shape, *, solid: bool = False) -> Box:
    """A box inside a tensor of `shape`; with at least one element if `solid`."""
    start, size = [], []
    for extent in shape:
        a = draw(st.integers(0, extent - 1 if solid else extent))
        start.append(a)
        size.append(draw(st.integers(1 if solid else 0, extent - a)))
    return Box(tuple(start), tuple(size))


@st.composite
def tilings(draw: Draw, shape: Shape, *, cuts: int = 6) -> list[Box]:
    """Boxes, in any order, that cover a tensor of `shape` exactly once."""
    boxes = [full_box(shape)]
    for _ in range(draw(st.integers(0, cuts))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        boxes.extend(_cut_in_two(draw, box))
    return draw(st.permutations(boxes))


def _cut_in_two(draw: Draw, box: Box) -> list[Box]:
    axes = [axis for axis, n in enumerate(box.size) if n > 1]
    if not axes:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.size[axis] - 1))
    low, high = list(box.size), list(box.size)
    low[axis], high[axis] = at, box.size[axis] - at
    start = list(box.start)
    start[axis] += at
    return [Box(box.start, tuple(low)), Box(tuple(start), tuple(high))]


def cells(box: Box) -> tuple[slice, ...]:
    """A box as numpy cuts it out of its tensor."""
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def owners(shape: Shape, boxes: list[Box]) -> NDArray[np.int64]:
    """How many of the boxes hold each element of a tensor."""
    count = np.zeros(shape, np.int64)
    for box in boxes:
        count[cells(box)] += 1
    return count
