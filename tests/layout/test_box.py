"""Boxes against a model that counts the owners of every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.layout.box import Box, BoxIndex, find_box_outside, find_overlap, find_slab_with_gap, full_box, intersect
from tests.strategies import boxes_in, cells, owners, shapes, solid_shapes, tilings


@given(st.data())
def test_intersect_is_what_both_hold(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = intersect(a, b)
    both = (owners(shape, [a]) * owners(shape, [b])).astype(bool)
    if shared is None:
        assert not both.any()
    else:
        assert shared.numel == both.sum()
        assert both[cells(shared)].all()


@given(st.data())
def test_an_index_finds_all_and_only_what_meets(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=8))
    wanted = data.draw(boxes_in(shape))
    found = dict(BoxIndex(boxes).intersections_with(wanted))
    expected = {i: shared for i, box in enumerate(boxes) if (shared := intersect(box, wanted))}
    assert found == expected


@given(st.data())
def test_overlaps_are_found_if_and_only_if_there_are_any(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    found = find_overlap(boxes)
    count = owners(shape, boxes)
    if found is None:
        assert not (count > 1).any()
    else:
        one, other, shared = found
        assert one != other
        assert shared == intersect(boxes[one], boxes[other])
        assert (count[cells(shared)] > 1).all()


@given(st.data())
def test_a_tiling_has_neither_gap_nor_overlap(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(tilings(shape))
    assert (owners(shape, boxes) == 1).all()
    assert find_box_outside(shape, boxes) is None
    assert find_overlap(boxes) is None
    assert find_slab_with_gap(shape, boxes) is None


@given(st.data())
def test_a_gap_is_found_where_it_is(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    boxes = data.draw(tilings(shape))
    kept = boxes[: data.draw(st.integers(0, len(boxes) - 1))]
    gap = find_slab_with_gap(shape, kept)
    assert gap is not None
    axis, start, stop = gap
    assert start < stop
    holes = owners(shape, kept) == 0
    if shape:
        for at in range(start, stop):
            assert holes.take(at, axis).any()


@given(st.data())
def test_empty_boxes_cover_nothing_and_disturb_nothing(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(tilings(shape))
    empty = Box((shape[0], *(0 for _ in shape[1:])), (0, *shape[1:]))
    assert find_box_outside(shape, [*boxes, empty, empty]) is None
    assert find_overlap([*boxes, empty, empty]) is None
    assert find_slab_with_gap(shape, [empty, *boxes]) is None


@given(st.data())
def test_outside_is_where_an_index_would_not_fit(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    numbers = st.lists(st.integers(-1, 6), min_size=len(shape), max_size=len(shape)).map(tuple)
    box = Box(data.draw(numbers), data.draw(numbers))
    fits = all(a >= 0 and n >= 0 and a + n <= end for a, n, end in zip(box.start, box.size, shape, strict=True))
    assert find_box_outside(shape, [full_box(shape), box]) == (None if fits else 1)


def test_a_box_of_another_rank_is_outside() -> None:
    assert find_box_outside((2, 2), [Box((0,), (2,))]) == 0
    assert find_box_outside((), [Box((), ()), Box((0,), (1,))]) == 1
    assert find_box_outside((2,), [Box((0,), (1, 1))]) == 0


def test_a_tensor_without_axes_is_one_element() -> None:
    assert full_box(()).numel == 1
    assert intersect(full_box(()), full_box(())) == full_box(())
    assert find_slab_with_gap((), []) is not None
    assert find_overlap([full_box(()), full_box(())]) is not None


@given(st.data())
def test_relative_to_keeps_the_elements(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    outer = data.draw(boxes_in(shape, solid=True))
    inner = intersect(outer, data.draw(boxes_in(shape)))
    if inner is not None:
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        assert np.array_equal(numbers[cells(outer)][cells(inner.relative_to(outer))], numbers[cells(inner)])
