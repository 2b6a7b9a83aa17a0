"""Tensors cut out of a flat one, against numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Corrupt
from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.layout.axes import cut_tensor_from_flat, flat_pieces_of_chunks
from ckptkit.layout.box import Box
from tests.stored_tensors import INT32, contents

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.lists(SHAPES, min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4))
def test_tensors_that_follow_one_another(shapes: list[tuple[int, ...]], sizes: list[tuple[int, int]]) -> None:
    """Pieces of any sizes, each with padding behind it that belongs to no tensor."""
    total = sum(map(prod, shapes))
    sizes.append((max(0, total - sum(size for size, _ in sizes)), 0))
    parts, chunks, at, begin = [], [], 0, 0
    for size, padding in sizes:
        parts.append(np.concatenate([np.arange(begin, begin + size), np.full(padding, -7)]).astype(np.int32))
        chunks.append((Chunk(Box((0,), (size + padding,)), "f", 4 * at, 4 * (size + padding), INT32), size))
        at, begin = at + size + padding, begin + size
    start = 0
    for shape in shapes:
        found = StoredTensor(
            Spec(INT32, shape), tuple(cut_tensor_from_flat(flat_pieces_of_chunks(chunks), start, shape))
        )
        expected = np.arange(start, start + prod(shape)).reshape(shape)
        assert np.array_equal(contents(found, np.concatenate(parts)), expected)
        start += prod(shape)


def test_a_piece_has_one_axis() -> None:
    chunk = Chunk(Box((0, 0), (2, 2)), "f", 0, 16, INT32)
    with pytest.raises(Corrupt, match="one axis"):
        list(cut_tensor_from_flat(flat_pieces_of_chunks([(chunk, 4)]), 0, (4,)))
