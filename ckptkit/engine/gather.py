"""Gather the elements of a box from its chunks into one buffer.

Elements that lie in the source as they shall lie in the buffer are read straight there. Only those that must be put
into another order or dtype go through a second buffer and numpy, which is not even imported before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from ckptkit.io.crc32 import Checksums, crc32
from ckptkit.io.file import OpenFiles
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, ReadRun
from ckptkit.layout.blocks import span_of
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DType

BLOCK_BYTES = 1 << 22
STEP_BYTES = 1 << 19  # read at once of a local file: they are in a core's cache for the checksum, and for a write


class Gatherer:
    """A reader of boxes of chunks in directory `root`. Belongs to one thread.

    It computes the CRC-32 of the runs that it reads of chunks for which `sums` returns True.
    """

    def __init__(self, root: Path, sums: Callable[[Chunk], bool] = lambda _: False) -> None:
        self._sums = sums
        self.step = BLOCK_BYTES if is_remote(root) else STEP_BYTES
        self.files = OpenFiles(root, in_order=True)

    def close(self) -> None:
        self.files.close()

    @cached_property
    def scratch(self) -> memoryview:
        """Return a block's worth of bytes, for elements that are not yet in place."""
        return memoryview(bytearray(BLOCK_BYTES))

    def fill(self, parts: Iterable[tuple[Chunk, Box]], box: Box, dtype: DType, out: memoryview) -> list[ReadRun]:
        """Put the elements of `box`, which `parts` tile with a box of a chunk each, into `out`: row-major, as `dtype`.

        Returns the runs of bytes that were read in one piece.
        """
        pieces: list[ReadRun] = []
        for chunk, part in parts:
            here = span_of(part, box, None)
            there = span_of(part, chunk.box, chunk.strides)
            if here.is_run and there.is_run and chunk.dtype == dtype:
                target = out[here.start * dtype.itemsize : (here.start + here.length) * dtype.itemsize]
                pieces.append(self.read_into(chunk, there.start * dtype.itemsize, target))
            else:
                from ckptkit.engine.rearrange import Rearrangement

                pieces.extend(Rearrangement(self.read_into, self.scratch, chunk, dtype).fill(part, box, out))
        return pieces

    def read_into(self, chunk: Chunk, start: int, target: memoryview) -> ReadRun:
        """Fill `target` with the chunk's bytes from `start`, as they lie, or with zeros."""
        if chunk.is_zeros:
            target[:] = bytes(len(target))
            return ReadRun(chunk, start, len(target), None)
        file, offset = self.files[chunk.path], chunk.offset + start
        crc = 0 if self._sums(chunk) else None
        for at in range(0, len(target), self.step):
            part = target[at : at + self.step]
            file.read_into(part, offset + at)
            if crc is not None:
                crc = crc32(part, crc)
        return ReadRun(chunk, start, len(target), crc)

    def load(self, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a file from `offset`."""
        self.files[path].read_into(target, offset)

    def checksum(self, path: str, offset: int, length: int) -> int:
        """Return the CRC-32 of `length` bytes at `offset` of a file."""
        whole: Checksums[str] = Checksums()
        for start in range(0, length, BLOCK_BYTES):
            target = self.scratch[: min(BLOCK_BYTES, length - start)]
            self.load(path, offset + start, target)
            whole.add(path, start, len(target), crc32(target))
        return whole.whole(path, length) or 0
