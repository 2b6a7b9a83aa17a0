"""Decompress the cells of orbax's arrays, one after the other, into a temporary file that goes with the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import BinaryIO

from ckptkit.destinations.allocation import check_room
from ckptkit.errors import CkptError, Corrupt, Report, refuse, translate_os_errors
from ckptkit.files.temporary import TemporaryFile
from ckptkit.formats.orbax.arrays import Arrays, Cell
from ckptkit.layout import Chunk, Layout


def unpack(layout: Layout, report: Report = refuse) -> Layout:
    """Return the layout with all its cells decompressed. No more than one is in memory.

    Reports a cell that is damaged, and leaves it as it is. Raises `NoRoom` if the disk is too small for the tensors.
    """
    arrays, kept = Arrays(layout.root), TemporaryFile()
    cells = [chunk for tensor in layout.tensors.values() for chunk in tensor.chunks if isinstance(chunk.where, Cell)]
    check_room(kept.path, sum(chunk.box.numel * chunk.dtype.itemsize for chunk in cells))
    with translate_os_errors(kept.path), kept.path.open("r+b") as file:

        def move(name: str, chunk: Chunk) -> Chunk:
            if not isinstance(chunk.where, Cell):
                return chunk
            try:
                offset, length = append(file, arrays, chunk, chunk.where)
            except CkptError as error:
                report(error.blame(path=layout.root / chunk.path, tensor=name))
                return chunk
            return chunk._replace(path=str(kept.path), offset=offset, length=length, where=None)

        tensors = {
            name: replace(tensor, chunks=tuple(move(name, chunk) for chunk in tensor.chunks))
            for name, tensor in layout.tensors.items()
        }
    return replace(layout, tensors=tensors, keeper=(layout.keeper, kept))


def append(file: BinaryIO, arrays: Arrays, chunk: Chunk, cell: Cell) -> tuple[int, int]:
    """Append the bytes of a cell; return where they begin, and how many they are."""
    data, offset = arrays.read(chunk.path, cell), file.tell()
    expected = cell.box.numel * chunk.dtype.itemsize
    if len(data) != expected:
        raise Corrupt(f"expected {expected} bytes in a cell, found {len(data)}")
    file.write(data)
    return offset, len(data)
