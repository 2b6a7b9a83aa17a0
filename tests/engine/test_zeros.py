"""Chunks that lie in no file: they are zeros wherever they are read, and nothing is counted as read for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.compare import compare_layouts
from ckptkit.engine.read import read_box
from ckptkit.layout import Chunk, Spec, StoredTensor, axes, check_chunks_tile
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import make_plan
from tests.execute import execute
from tests.raw import Files, allocated, contents
from tests.strategies import tilings

INT32, INT64 = DTYPES["int32"], DTYPES["int64"]


def zeros(rows: int, columns: int) -> StoredTensor:
    return StoredTensor(Spec(INT32, (rows, columns)), (Chunk.of_zeros(full_box((rows, columns)), INT32),))


@pytest.mark.parametrize("block", [48, 1 << 22])
@given(data=st.data())
def test_rows_of_zeros(block: int, data: st.DataObject) -> None:
    """Behind rows that are there, in whatever order of axes, from any tiling to any slabs."""
    rows, more, columns = (data.draw(st.integers(1, 5)) for _ in range(3))
    numbers = data.draw(st.just(np.arange(1, rows * columns + 1, dtype=np.int32).reshape(rows, columns)))
    is_turned = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        for module in ("blocks", "visit"):
            patch.setattr(f"ckptkit.engine.{module}.BLOCK_BYTES", block)
        patch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", min(block // 2, 1 << 16))
        source = Files(Path(home, "src"))
        chunks = tuple(source.put(numbers, box, INT32) for box in data.draw(tilings((rows, columns))))
        padded = axes.concatenate([StoredTensor(Spec(INT32, (rows, columns)), chunks), zeros(more, columns)], 0)
        wanted = np.concatenate([numbers, np.zeros((more, columns), np.int32)])
        if is_turned:
            padded, wanted = axes.permute_axes(padded, (1, 0)), wanted.T
        src = source.layout(t=padded)
        check_chunks_tile(src)
        extent, width = wanted.shape
        at = data.draw(st.integers(0, extent))
        slabs = [Box((a, 0), (b - a, width)) for a, b in ((0, at), (at, extent)) if a < b]
        dst = allocated(Path(home, "dst"), Spec(INT32, wanted.shape), slabs)

        copied = execute(make_plan(src, dst))

        assert contents(dst) == np.ascontiguousarray(wanted).tobytes()
        assert (copied.checked_bytes, copied.unchecked_bytes) == (numbers.nbytes, 0)
        assert read_box(src, "t", full_box(wanted.shape)) == np.ascontiguousarray(wanted).tobytes()
        assert not compare_layouts(src, dst).differing_names
