"""Scans: files read from end to end, for the CRC-32 of each run of bytes in them and of the whole. Names no format.

A file is read in blocks of bounded size, in order and whatever lies in it, so that many small tensors are read as fast
as a few large ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ckptkit.engine.gather import BLOCK_BYTES, Gatherer
from ckptkit.engine.regions import Block, blocks, by_file, cut, ignore
from ckptkit.engine.workers import Step, work
from ckptkit.errors import CkptError, Report
from ckptkit.files.crc32 import Checksums, crc32
from ckptkit.files.file import Opened, read_at
from ckptkit.layout import Extent, Place

Progress = Callable[[int], None]
_PAGE = 4096  # bytes


@dataclass(frozen=True, slots=True)
class Scanned:
    """The CRC-32 of every extent and of every file that could be read whole."""

    extents: Mapping[Place, int]
    files: Mapping[str, int]


def scan(
    root: Path,
    sizes: Mapping[str, int],
    extents: Iterable[Extent],
    report: Report,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Scanned:
    """Read files of directory `root`, given with their sizes in bytes, from end to end.

    Reports what cannot be read, and extents that overlap; compares nothing. `progress` is told of bytes read.
    """
    parts: Checksums[Place] = Checksums()
    wholes: Checksums[str] = Checksums()
    lock = threading.Lock()
    tiles = {path: cut(root / path, sizes[path], found, report) for path, found in by_file(sizes, extents).items()}

    @contextmanager
    def reader() -> Iterator[Step[Block]]:
        out = memoryview(bytearray(BLOCK_BYTES))
        with Opened(root, in_order=True) as files:

            def read(block: Block) -> None:
                data = out[: block.stop - block.start]
                try:
                    files[block.path].read_into(data, block.start)
                except CkptError as error:
                    with lock:
                        report(error.blame(path=root / block.path, tensor=block.tiles[0][0].name or None))
                    return
                sums = [crc32(data[start - block.start : stop - block.start]) for _, start, stop in block.tiles]
                with lock:
                    for (tile, start, stop), crc in zip(block.tiles, sums, strict=True):
                        parts.add((tile.path, tile.offset), start - tile.offset, stop - start, crc)
                        wholes.add(tile.path, start, stop - start, crc)
                    if progress:
                        progress(len(data))

            yield read

    work((block for path in sizes for block in blocks(path, sizes[path], tiles[path], BLOCK_BYTES)), reader, jobs, root)
    found = {
        (tile.path, tile.offset): crc
        for tile in chain(*tiles.values())
        if (crc := parts.whole((tile.path, tile.offset), tile.length)) is not None
    }
    files = {path: crc for path, size in sizes.items() if (crc := wholes.whole(path, size)) is not None}
    return Scanned(found, files)


def sum_file(root: Path, path: str, size: int, extents: Iterable[Extent]) -> int:
    """CRC-32 of a file of `size` bytes of which the extents have theirs: only what lies between them is read."""
    whole: Checksums[str] = Checksums()
    with Gatherer(root) as source:
        for tile in cut(root / path, size, (extent for extent in extents if extent.crc32 is not None), ignore):
            crc = source.checksum(path, tile.offset, tile.length) if tile.crc32 is None else tile.crc32
            whole.add(path, tile.offset, tile.length, crc)
    found = whole.whole(path, size)
    assert found is not None, "tiles leave no gap"
    return found


def find_zeros(root: Path, extent: Extent) -> int | None:
    """Where in its file the first page of zeros in an extent begins, None if there is none."""
    with Opened(root, in_order=True) as files:
        for start in range(extent.offset, extent.offset + extent.length, BLOCK_BYTES):
            length = min(BLOCK_BYTES, extent.offset + extent.length - start)
            at = read_at(files[extent.path], length, start).find(bytes(min(_PAGE, length)))
            if at >= 0:
                return start + at
    return None
