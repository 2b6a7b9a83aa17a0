"""Blocks against a model that numbers every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckptkit.layout.box import cut_box, full_box, halve_box, row_major_strides, span_of
from tests.strategies import boxes_in, cells, shapes, solid_shapes


@given(st.data())
def test_cut_gives_runs_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(boxes_in(shape))
    limit = data.draw(st.integers(1, 40))
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    blocks = list(cut_box(box, limit))
    assert all(1 <= block.numel <= limit for block in blocks)
    listed = [number for block in blocks for number in numbers[cells(block)].ravel()]
    assert listed == list(numbers[cells(box)].ravel())


@given(solid_shapes, st.integers(1, 40))
def test_cut_fills_its_blocks_as_far_as_rows_go(shape: tuple[int, ...], limit: int) -> None:
    blocks = list(cut_box(full_box(shape), limit))
    assert len(blocks) <= 2 * -(-full_box(shape).numel // limit) * max(shape, default=1)


@given(st.data())
def test_a_span_goes_from_the_first_to_the_last_element(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    chunk = data.draw(boxes_in(shape, solid=True))
    inner = data.draw(boxes_in(chunk.size, solid=True))
    box = type(inner)(tuple(a + b for a, b in zip(inner.start, chunk.start, strict=True)), inner.size)
    order = data.draw(st.permutations(range(len(shape))))
    permuted = row_major_strides(tuple(chunk.size[axis] for axis in order))
    strides = tuple(permuted[order.index(axis)] for axis in range(len(shape)))
    plain = data.draw(st.booleans())
    steps = row_major_strides(chunk.size) if plain else strides
    memory = np.arange(chunk.numel)
    view = as_strided(memory, chunk.size, [step * memory.itemsize for step in steps])
    inside = view[cells(inner)].ravel()

    span = span_of(box, chunk, None if plain else strides)

    assert span.start == inside.min()
    assert span.start + span.length == inside.max() + 1
    if span.is_run:
        assert list(inside) == list(range(span.start, span.start + span.length))
    if plain and list(inside) == list(range(inside[0], inside[0] + len(inside))):
        assert span.is_run


@given(st.data())
def test_halves_are_two_parts_of_one(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes.filter(lambda shape: max(shape, default=0) > 1))
    box = data.draw(boxes_in(shape, solid=True).filter(lambda box: box.numel > 1))
    low, high = halve_box(box, row_major_strides(shape))
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = np.concatenate([numbers[cells(low)].ravel(), numbers[cells(high)].ravel()])
    assert low.numel
    assert high.numel
    assert sorted(parts) == sorted(numbers[cells(box)].ravel())


def test_row_major_strides() -> None:
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)
    assert row_major_strides(()) == ()
