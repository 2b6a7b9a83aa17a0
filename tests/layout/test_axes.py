"""Axes of stored tensors against numpy's own: the same elements, whatever the chunks that a tensor lies in."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Corrupt, Mismatch
from ckptkit.layout import Chunk, Spec, StoredTensor, axes
from ckptkit.layout.box import Box
from tests.raw import Numbers
from tests.stored_tensors import INT32, contents, stored


@st.composite
def tensors(draw: st.DrawFn, ndim: int = 3) -> tuple[Numbers, StoredTensor, Numbers]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=ndim, max_size=ndim)))
    numbers = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    cuts = draw(st.lists(st.integers(0, 6), max_size=3))
    tensor, file = stored(numbers, cuts, draw(st.permutations(range(ndim))))
    return numbers, tensor, file


@given(tensors(), st.data())
def test_cut_and_take(made: tuple[Numbers, StoredTensor, Numbers], data: st.DataObject) -> None:
    numbers, tensor, file = made
    axis = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, numbers.shape[axis] - 1))
    stop = data.draw(st.integers(start, numbers.shape[axis]))
    found = axes.narrow_axis(tensor, axis, start, stop)
    expected = np.moveaxis(np.moveaxis(numbers, axis, 0)[start:stop], 0, axis)
    assert np.array_equal(contents(found, file), expected)
    assert np.array_equal(contents(axes.take_at_index(tensor, axis, start), file), numbers.take(start, axis))
    parts = [axes.narrow_axis(tensor, axis, a, b) for a, b in ((0, start), (start, stop), (stop, numbers.shape[axis]))]
    assert np.array_equal(contents(axes.concatenate(parts, axis), file), numbers)


@given(tensors(), st.permutations(range(3)))
def test_permute(made: tuple[Numbers, StoredTensor, Numbers], order: list[int]) -> None:
    numbers, tensor, file = made
    assert np.array_equal(contents(axes.permute_axes(tensor, order), file), numbers.transpose(order))


@given(tensors(2), st.data())
def test_rows_of_split_axes_in_another_order(made: tuple[Numbers, StoredTensor, Numbers], data: st.DataObject) -> None:
    """Split the first axis, permute its parts and merge them again: with splits or without."""
    numbers, _, _ = made
    extents = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    rows = prod(extents)
    numbers = np.arange(rows * numbers.shape[1], dtype=np.int32).reshape(rows, numbers.shape[1])
    tensor, file = stored(numbers, data.draw(st.lists(st.integers(0, rows), max_size=3)), [0, 1])
    order = data.draw(st.permutations(range(len(extents))))
    apart = axes.split_axis(tensor, 0, extents)
    assert np.array_equal(contents(apart, file), numbers.reshape(*extents, -1))
    moved = axes.permute_axes(apart, [*order, len(extents)])
    merged = axes.merge_axes(moved, 0, len(extents))
    expected = numbers.reshape(*extents, -1).transpose([*order, len(extents)]).reshape(numbers.shape)
    assert merged.spec.shape == numbers.shape
    assert np.array_equal(contents(merged, file), expected)
    assert np.array_equal(contents(axes.with_unsplit_chunks(merged), file), expected)
    if merged.splits is not None:
        assert np.array_equal(contents(axes.with_split_chunks(tensor, merged.splits), file), numbers)


@given(tensors(2))
def test_stack(made: tuple[Numbers, StoredTensor, Numbers]) -> None:
    numbers, tensor, file = made
    found = axes.stack_tensors([tensor, tensor, tensor])
    assert np.array_equal(contents(found, file), np.stack([numbers] * 3))
    merged = axes.merge_axes(found, 0, 2)
    assert np.array_equal(contents(merged, file), np.concatenate([numbers] * 3))


def test_the_fused_projections_of_groups_come_apart_and_together() -> None:
    groups, heads, width, hidden = 2, 3, 4, 5
    numbers = np.arange(groups * (heads + 2) * width * hidden, dtype=np.int32).reshape(-1, hidden)
    tensor, file = stored(numbers, [7, 11], [0, 1])
    apart = axes.split_axis(tensor, 0, (groups, heads + 2, width))
    query = axes.merge_axes(axes.narrow_axis(apart, 1, 0, heads), 0, 3)
    value = axes.merge_axes(axes.narrow_axis(apart, 1, heads + 1, heads + 2), 0, 3)
    view = numbers.reshape(groups, heads + 2, width, hidden)
    assert query.splits is None
    assert np.array_equal(contents(query, file), view[:, :heads].reshape(-1, hidden))
    assert np.array_equal(contents(value, file), view[:, -1].reshape(-1, hidden))


def test_rotary_rows_are_one_box_of_split_axes() -> None:
    """Of 2 heads of 8 rows, in one chunk: HF has the even rows of a head first."""
    numbers = np.arange(16, dtype=np.int32).reshape(16, 1)
    tensor, file = stored(numbers, [], [0, 1])
    moved = axes.merge_axes(axes.permute_axes(axes.split_axis(tensor, 0, (2, 4, 2)), (0, 2, 1, 3)), 0, 3)
    assert contents(moved, file)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert moved.splits == ((2, 2, 4), (1,))
    assert len(moved.chunks) == 1


Wrong = Callable[[StoredTensor], StoredTensor]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensor: axes.narrow_axis(tensor, 0, 2, 9),
        lambda tensor: axes.split_axis(tensor, 0, (3, 3)),
        lambda tensor: axes.concatenate([tensor, axes.narrow_axis(tensor, 1, 0, 1)], 0),
        lambda tensor: axes.stack_tensors([tensor, axes.narrow_axis(tensor, 1, 0, 1)]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong: Wrong) -> None:
    tensor, _ = stored(np.zeros((4, 2), np.int32), [], [0, 1])
    with pytest.raises(Mismatch):
        wrong(tensor)


def test_a_part_keeps_the_bytes_that_its_checksum_is_over() -> None:
    tensor, _ = stored(np.arange(8, dtype=np.int32).reshape(4, 2), [2], [0, 1])
    parts = axes.narrow_axis(axes.narrow_axis(tensor, 0, 1, 4), 1, 0, 1).chunks
    assert [part.checksummed_range for part in parts] == [(0, 16), (16, 16)]
    assert [part.crc32 for part in parts] == [0, 1]


@given(tensors())
def test_unstack(made: tuple[Numbers, StoredTensor, Numbers]) -> None:
    numbers, tensor, file = made
    parts = axes.unstack(tensor)
    assert all(np.array_equal(contents(part, file), one) for part, one in zip(parts, numbers, strict=True))
    assert np.array_equal(contents(axes.stack_tensors(parts), file), numbers)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 3), st.data())
def test_runs_of_a_flat_tensor_are_boxes_of_it(shape: list[int], step: int, begin: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbers = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    size = begin + stop - start
    file = np.full(step * size + 1, -7, np.int32)
    file[: step * size : step][begin:] = numbers.reshape(-1)[start:stop]
    span = 4 * (step * (size - 1) + 1) if size else 0
    buffer = Chunk(Box((0,), (size,)), "f", 0, span, INT32, None if step == 1 else (step,), crc32=5)
    chunks = tuple(axes.chunks_of_flat_range(buffer, begin, tuple(shape), start, stop))
    found = contents(StoredTensor(Spec(INT32, tuple(shape)), chunks), file).reshape(-1)
    assert found[start:stop].tolist() == list(range(start, stop))
    assert {-1} >= set(found[:start].tolist()) | set(found[stop:].tolist())
    assert all((chunk.checksummed_range, chunk.crc32) == ((0, span), 5) for chunk in chunks)


def test_a_run_lies_in_one_axis() -> None:
    tensor, _ = stored(np.zeros((4, 2), np.int32), [], [0, 1])
    with pytest.raises(Corrupt, match="one axis"):
        list(axes.chunks_of_flat_range(tensor.chunks[0], 0, (8,), 0, 8))


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 8), max_size=2), st.data())
def test_part_of_rows_in_another_order(count: int, of: int, cuts: list[int], data: st.DataObject) -> None:
    """Rows that come in turn are brought together, and some are taken: at a border of these, nothing comes apart."""
    numbers = np.arange(count * of * 3, dtype=np.int32).reshape(count * of, 3)
    tensor, file = stored(numbers, cuts, [0, 1])
    turned = axes.merge_axes(axes.permute_axes(axes.split_axis(tensor, 0, (count, of)), (1, 0, 2)), 0, 2)
    expected = numbers.reshape(count, of, 3).swapaxes(0, 1).reshape(count * of, 3)
    start = data.draw(st.integers(0, count * of))
    stop = data.draw(st.integers(start, count * of))
    found = axes.narrow_axis(turned, 0, start, stop)
    assert np.array_equal(contents(found, file), expected[start:stop])
    one = axes.narrow_axis(turned, 0, 0, count)
    assert np.array_equal(contents(one, file), expected[:count])
    assert len(one.chunks) <= 3 * len(tensor.chunks)
