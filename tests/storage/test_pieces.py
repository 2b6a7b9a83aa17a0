"""Parts of tensors written to their places, against numpy and zlib over the whole."""

from __future__ import annotations

import random
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptkit.io.crc32 import crc32_from_contributions, xor_contribution
from ckptkit.io.file import OpenFiles
from ckptkit.layout import FileOffset, Layout, Spec
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.storage.local_writer import PieceWriter, contiguous_ranges_in_chunk
from tests.raw import allocated, contents
from tests.strategies import boxes_in, cells, shapes, solid_shapes, tilings


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    """Let a block be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("memory", "local_writer"):
            patch.setattr(f"ckptkit.storage.{module}.BLOCK_BYTES", 96)
        yield


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)), st.randoms())
def test_parts_in_any_order_give_the_checksum_of_the_whole(data: bytes, cuts: list[int], order: random.Random) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = list(pairwise(edges))
    order.shuffle(parts)
    total = 0
    for start, stop in parts:
        total ^= xor_contribution(memoryview(data)[start:stop], len(data) - stop)
    assert crc32_from_contributions(total, len(data)) == zlib.crc32(data)


@given(st.data())
def test_runs_are_the_elements_of_a_box_in_order_and_as_few_as_they_can_be(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    box = data.draw(boxes_in(shape, solid=True))
    starts, length = contiguous_ranges_in_chunk(box, full_box(shape))
    numbers = torch.arange(full_box(shape).numel).reshape(shape)[cells(box)].flatten().tolist()
    assert [start + i for start in starts for i in range(length)] == numbers
    breaks = sum(b != a + 1 for a, b in pairwise(numbers))
    assert len(starts) == breaks + 1


def write_all(layout: Layout, parts: list[tuple[Box, Tensor]]) -> dict[FileOffset, int]:
    """Write each part of tensor `t`, and add up what they give for each chunk."""
    sums: dict[FileOffset, int] = {}
    with OpenFiles(layout.root, writable=True) as files:
        pieces = PieceWriter(files)
        for box, tensor in parts:
            for place, part in pieces.write_tensor(tensor, box, layout.tensors["t"]).items():
                sums[place] = sums.get(place, 0) ^ part
    return sums


def require_written(layout: Layout, values: Tensor, sums: dict[FileOffset, int]) -> None:
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert contents(layout) == raw
    for chunk in layout.tensors["t"].chunks:
        if chunk.length:
            data = (layout.root / chunk.path).read_bytes()[chunk.offset : chunk.offset + chunk.length]
            assert crc32_from_contributions(sums[chunk.path, chunk.offset], chunk.length) == zlib.crc32(data)


def scattered(values: Tensor) -> Tensor:
    """The same values, but with others between them in memory."""
    twice = torch.stack([values, values], dim=-1)
    return twice[..., 0]


@given(st.data(), st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool", "complex128"]), st.booleans())
def test_any_parts_make_up_any_chunks(data: st.DataObject, dtype: str, is_scattered: bool) -> None:
    shape = data.draw(shapes)
    theirs, ours = data.draw(tilings(shape)), data.draw(tilings(shape))
    itemsize = DTYPES[dtype].itemsize
    count = full_box(shape).numel
    values = torch.arange(count * itemsize).remainder(2 if dtype == "bool" else 251).to(torch.uint8)
    values = values.view(getattr(torch, dtype)).reshape(shape)
    parts = [(box, values[cells(box)] if is_scattered else values[cells(box)].contiguous()) for box in theirs]
    with tempfile.TemporaryDirectory() as room:
        layout = allocated(Path(room) / "files", Spec(DTYPES[dtype], shape), ours)
        require_written(layout, values, write_all(layout, parts))
