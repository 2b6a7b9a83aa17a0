"""Decompress the cells of orbax's arrays, one after the other, into a temporary file that goes with the layout."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from ckptkit.errors import CkptError, Report, refuse, translate_os_errors
from ckptkit.io.allocation import TemporaryFile, check_room
from ckptkit.io.file import OpenFiles
from ckptkit.io.local import open_to_write
from ckptkit.layout import Chunk, Layout
from ckptkit.plugins.orbax.arrays import Cell, decompress

Move = tuple[str, Chunk, int]  # a cell of a tensor, and the offset in the temporary file of what is in it


def unpack(layout: Layout, report: Report = refuse) -> Layout:
    """Return the layout with all its cells decompressed. No more than one is in memory.

    Reports a cell that is damaged, and leaves it as it is. Raises `NoRoom` if the disk is too small for the tensors.
    """
    stored = [(name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks if is_cell(chunk)]
    *offsets, total = accumulate((nbytes_of(chunk) for _, chunk in stored), initial=0)
    kept = TemporaryFile()
    check_room(kept.path, total)
    with translate_os_errors(kept.path):
        os.truncate(kept.path, total)
    moves = [(name, chunk, offset) for (name, chunk), offset in zip(stored, offsets, strict=True)]
    failed = move_all(layout, moves, kept.path, report)
    moved = {
        (name, chunk.box): chunk._replace(path=str(kept.path), offset=offset, length=nbytes_of(chunk), where=None)
        for name, chunk, offset in moves
        if offset not in failed
    }
    tensors = {
        name: replace(tensor, chunks=tuple(moved.get((name, chunk.box), chunk) for chunk in tensor.chunks))
        for name, tensor in layout.tensors.items()
    }
    return replace(layout, tensors=tensors, keeper=(layout.keeper, kept))


def move_all(layout: Layout, moves: list[Move], place: Path, report: Report) -> set[int]:
    """Write what is in each cell to its offset of file `place`; return the offsets of those that are damaged."""
    failed: set[int] = set()
    with OpenFiles(layout.root) as files, closing(open_to_write(place)) as file:
        for name, chunk, offset in moves:
            try:
                found = decompress(chunk, files, layout.root / chunk.path)
            except CkptError as error:
                failed.add(offset)
                report(error.blame(path=layout.root / chunk.path, tensor=name))
            else:
                file.write_at(found, offset)
    return failed


def is_cell(chunk: Chunk) -> bool:
    return isinstance(chunk.where, Cell)


def nbytes_of(chunk: Chunk) -> int:
    return chunk.box.numel * chunk.dtype.itemsize
