"""Ranges of flattened tensors as boxes, against numpy's own flattening."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.layout.axes import boxes_of_range


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_hold_the_elements_of_the_range_in_its_order(extents: list[int], data: st.DataObject) -> None:
    shape = tuple(extents)
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = np.arange(numel).reshape(shape)
    found = list(boxes_of_range(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    expected = start
    for box, begin in found:
        held = elements[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1)
        assert start + begin == expected
        assert held.tolist() == list(range(expected, expected + box.numel))
        expected += box.numel
    assert expected == stop
