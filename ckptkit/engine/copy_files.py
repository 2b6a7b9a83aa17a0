"""Copy files as they are, piece by piece, and sum each run of bytes in them and each file on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ckptkit.engine.scan import Progress, Scanned, between, by_file, cut
from ckptkit.engine.workers import Step, work
from ckptkit.errors import Report
from ckptkit.io.crc32 import Checksums, combine, crc32
from ckptkit.io.file import OpenFiles
from ckptkit.io.pieces import FilePiece, PieceSink, cut_file, new_piece
from ckptkit.layout import Extent, FileOffset

JOBS = 8  # threads, each with a buffer of one piece


def copy_files(
    root: Path,
    sizes: Mapping[str, int],
    extents: Iterable[Extent],
    sink: PieceSink,
    report: Report,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Scanned:
    """Copy files of directory `root`, given with their sizes in bytes, into a sink.

    Returns the CRC-32 of each extent and of each file. Reports extents that overlap; compares nothing. `progress` is
    told of bytes copied.
    """
    parts: Checksums[FileOffset] = Checksums()
    wholes: Checksums[str] = Checksums()
    regions = {path: cut(root, path, sizes[path], found, report) for path, found in by_file(sizes, extents).items()}
    lock = Lock()

    def sum_up(piece: FilePiece, data: memoryview) -> int:
        total = 0
        for region, start, stop in list(between(regions[piece.name], piece.start, piece.start + piece.length)):
            crc = crc32(data[start - piece.start : stop - piece.start])
            total = combine(total, crc, stop - start)
            with lock:
                parts.add((region.path, region.offset), start - region.offset, stop - start, crc)
        with lock:
            wholes.add(piece.name, piece.start, piece.length, total)
        return total

    @contextmanager
    def copying() -> Iterator[Step[FilePiece]]:
        with OpenFiles(root, in_order=True) as files:

            def step(piece: FilePiece) -> None:
                data = new_piece(piece.length)
                is_there = sink.recall(piece, data)
                if not is_there and data:
                    files[piece.name].read_into(data, piece.start)
                crc = sum_up(piece, data)
                if not is_there:
                    sink.put(piece, data, crc)
                if progress:
                    with lock:
                        progress(piece.length)

            try:
                yield step
            except BaseException as error:
                sink.stop(error)
                raise

    work((piece for name, size in sizes.items() for piece in cut_file(name, size)), copying, jobs or JOBS)
    found = {
        (region.path, region.offset): crc
        for path in regions
        for region in regions[path]
        if (crc := parts.whole((region.path, region.offset), region.length)) is not None
    }
    files = {path: crc for path, size in sizes.items() if (crc := wholes.whole(path, size)) is not None}
    return Scanned(found, files)
