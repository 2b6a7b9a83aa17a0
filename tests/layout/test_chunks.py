"""Where the bytes of a chunk are: in a file, in an envelope, nowhere since they are zeros, unreadable, or lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import Usage
from ckptkit.layout import Blob, Chunk, Fault, Layout, Spec, StoredTensor, Unreadable, Wrapped, axes
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.edits import split_off_lost_tensors
from ckptkit.layout.plan import make_plan

FLOAT = DTYPES["float32"]
SPEC = Spec(FLOAT, (4, 2))
FAULT = Fault("the disk is gone", Path("/run/f"))
PLAIN = Chunk(full_box((4, 2)), "f", 0, 32, FLOAT)


def layout_of(*chunks: Chunk, **blobs: Blob) -> Layout:
    return Layout(Path("/run"), "any", {str(i): StoredTensor(SPEC, (one,)) for i, one in enumerate(chunks)}, blobs)


def test_each_is_one_of_them() -> None:
    chunks = [
        PLAIN,
        PLAIN._replace(where=Wrapped("torch.save")),
        Chunk.of_zeros(PLAIN.box, FLOAT, 64),
        Chunk.unreadable(PLAIN.box, "f", FLOAT),
        Chunk.lost(PLAIN.box, FLOAT, FAULT),
    ]
    found = [(one.is_in_file, one.wrapper, one.is_zeros, one.is_unreadable, one.is_lost) for one in chunks]
    assert found == [
        (True, None, False, False, False),
        (True, "torch.save", False, False, False),
        (False, None, True, False, False),
        (False, None, False, True, False),
        (False, None, False, False, True),
    ]
    assert {one.length for one in chunks} == {SPEC.nbytes}


def test_parts_of_a_lost_chunk_are_lost_by_the_same_fault() -> None:
    half = Chunk.lost(Box((0, 0), (2, 2)), FLOAT, FAULT)
    tensor = StoredTensor(SPEC, (half, PLAIN._replace(box=Box((2, 0), (2, 2)), length=16)))
    edited = axes.permute_axes(axes.narrow_axis(tensor, 0, 1, 4), (1, 0))
    assert [chunk.where for chunk in edited.chunks] == [FAULT, None]
    assert edited.is_lost
    assert not axes.narrow_axis(tensor, 0, 2, 4).is_lost


def test_only_files_that_are_named_are_read() -> None:
    missing, zeros, lost = Chunk.unreadable(PLAIN.box, "g", FLOAT), Chunk.of_zeros(PLAIN.box, FLOAT), FAULT
    layout = layout_of(
        PLAIN, missing, zeros, Chunk.lost(PLAIN.box, FLOAT, lost), step=Blob("h", 0, 1, where=Unreadable())
    )
    assert layout.paths == {"f", "g", "h"}
    whole_ones, left = split_off_lost_tensors(layout)
    assert (list(whole_ones.tensors), list(left)) == (["0", "1", "2"], ["3"])


@pytest.mark.parametrize("where", [Wrapped("torch.save"), Unreadable(), FAULT])
def test_nothing_is_planned_from_bytes_that_are_not_there(where: Wrapped | Unreadable | Fault) -> None:
    source, target = layout_of(PLAIN._replace(where=where)), layout_of(PLAIN)
    with pytest.raises(Usage) as caught:
        make_plan(source, target)
    assert caught.value.path == Path("/run/f")
    assert caught.value.tensor == "0"
    assert make_plan(layout_of(Chunk.of_zeros(PLAIN.box, FLOAT)), target).nbytes == 32
