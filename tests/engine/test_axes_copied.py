"""Tensors whose axes were edited, copied through the engine: every element in its place, every checksum compared."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout import Spec, StoredTensor, axes
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import make_plan
from tests.execute import execute
from tests.raw import Files, allocated, contents
from tests.strategies import tilings

INT32 = DTYPES["int32"]


def rows_of(extent: int, cuts: list[int], columns: int) -> list[Box]:
    """Slabs of rows, as FSDP has them."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < extent}), extent]
    return [Box((a, 0), (b - a, columns)) for a, b in pairwise(edges)]


@pytest.mark.parametrize("block", [48, 1 << 22])
@given(data=st.data())
def test_rows_in_another_order(block: int, data: st.DataObject) -> None:
    """Any split of the rows, permuted and merged, from any tiling to any slabs of rows."""
    extents = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(extents))))
    rows, columns = prod(extents), data.draw(st.integers(1, 3))
    numbers = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        for module in ("blocks", "shares", "visit"):
            patch.setattr(f"ckptkit.engine.{module}.BLOCK_BYTES", block)
        patch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", min(block // 2, 1 << 16))
        source = Files(Path(home, "src"))
        chunks = tuple(source.put(numbers, box, INT32) for box in data.draw(tilings((rows, columns))))
        stored = StoredTensor(Spec(INT32, (rows, columns)), chunks)
        moved = axes.permute_axes(axes.split_axis(stored, 0, extents), [*order, len(extents)])
        src = source.layout(t=axes.merge_axes(moved, 0, len(extents)))
        slabs = rows_of(rows, data.draw(st.lists(st.integers(0, rows), max_size=3)), columns)
        dst = allocated(Path(home, "dst"), Spec(INT32, (rows, columns)), slabs)

        copied = execute(make_plan(src, dst), jobs=data.draw(st.integers(1, 2)))

        expected = numbers.reshape(*extents, columns).transpose([*order, len(extents)]).reshape(rows, columns)
        assert contents(dst) == expected.tobytes()
        assert copied.checked_bytes == numbers.nbytes
        assert set(copied.checksums) == {(chunk.path, chunk.offset) for chunk in dst.tensors["t"].chunks}


@given(data=st.data())
def test_a_flipped_bit_shows_in_whatever_is_made_of_a_part(data: st.DataObject) -> None:
    """Also where the bit is in a part that nothing is made of."""
    numbers = np.arange(24, dtype=np.int32).reshape(6, 4)
    with tempfile.TemporaryDirectory() as home:
        source = Files(Path(home, "src"))
        chunk = source.put(numbers, Box((0, 0), (6, 4)), INT32)
        stored = StoredTensor(Spec(INT32, (6, 4)), (chunk,))
        raw = bytearray((source.root / "f").read_bytes())
        raw[chunk.offset + data.draw(st.integers(0, chunk.length - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (source.root / "f").write_bytes(raw)
        axis = data.draw(st.integers(0, 1))
        src = source.layout(t=axes.narrow_axis(stored, axis, 1, 3))
        spec = src.tensors["t"].spec
        dst = allocated(Path(home, "dst"), spec, [Box((0, 0), spec.shape)])
        with pytest.raises(Corrupt, match="CRC-32"):
            execute(make_plan(src, dst))


def test_shards_of_columns_that_would_not_lie_together_are_refused(tmp_path: Path) -> None:
    """Of columns that are interleaved, a shard has some of each half."""
    numbers = np.arange(24, dtype=np.int32).reshape(4, 6)
    source = Files(tmp_path / "src")
    stored = StoredTensor(Spec(INT32, (4, 6)), (source.put(numbers, Box((0, 0), (4, 6)), INT32),))
    src = source.layout(t=axes.merge_axes(axes.permute_axes(axes.split_axis(stored, 1, (3, 2)), (0, 2, 1)), 1, 2))
    shards = [Box((0, 0), (4, 4)), Box((0, 4), (4, 2))]
    dst = allocated(tmp_path / "dst", Spec(INT32, (4, 6)), shards)
    with pytest.raises(Unsupported, match="would not be contiguous"):
        execute(make_plan(src, dst))
