"""Scan files from end to end, and optionally copy them, to get the CRC-32 of each extent and of each whole file.

A file is read in order, in blocks of bounded size that ignore the extents, so many small tensors are read as fast as a
few large ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TypeVar

from ckptkit.engine.blocks import BLOCK_BYTES, Block, Gatherer
from ckptkit.engine.visit import Pieces, Step, Worker, process_units, visit_blocks
from ckptkit.errors import CkptError, Corrupt, Report, skip_problem
from ckptkit.io.crc32 import Checksums, combine_crc32, crc32
from ckptkit.io.file import OpenFiles, read_at
from ckptkit.io.pieces import FilePiece, PieceSink, cut_into_pieces, new_piece_buffer
from ckptkit.io.progress import BytesDone
from ckptkit.layout import Extent, FileOffset
from ckptkit.layout.plan import plan_range_reads

JOBS = 8  # threads, each with a buffer of one piece
_PAGE = 4096  # bytes
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Scanned:
    """The CRC-32 of every extent and of every file that could be read completely."""

    extents: Mapping[FileOffset, int]
    files: Mapping[str, int]


class RegionSums:
    """The regions of files, given with their sizes in bytes, and their CRC-32. Reports extents that overlap."""

    def __init__(self, root: Path, sizes: Mapping[str, int], extents: Iterable[Extent], report: Report) -> None:
        self._sizes = sizes
        self._regions = {
            path: regions_of_file(root, path, sizes[path], in_file, report)
            for path, in_file in extents_by_file(sizes, extents).items()
        }
        self._extents: Checksums[FileOffset] = Checksums()
        self._files: Checksums[str] = Checksums()

    def inside(self, path: str, start: int, length: int) -> list[tuple[Extent, int, int]]:
        return list(overlapping_regions(self._regions[path], start, start + length))

    def add(self, region: Extent, start: int, stop: int, crc: int) -> None:
        self._extents.add((region.path, region.offset), start - region.offset, stop - start, crc)
        self._files.add(region.path, start, stop - start, crc)

    def result(self) -> Scanned:
        places = {(one.path, one.offset): one.length for one in chain(*self._regions.values())}
        return Scanned(
            checksums_of_complete_ranges(self._extents, places), checksums_of_complete_ranges(self._files, self._sizes)
        )


def checksums_of_complete_ranges(sums: Checksums[Key], lengths: Mapping[Key, int]) -> dict[Key, int]:
    return {key: crc for key, length in lengths.items() if (crc := sums.find_complete_crc(key, length)) is not None}


def copy_files(
    root: Path,
    sizes: Mapping[str, int],
    extents: Iterable[Extent],
    sink: PieceSink,
    report: Report,
    *,
    jobs: int | None = None,
    progress: BytesDone | None = None,
) -> Scanned:
    """Copy files, given with their sizes in bytes, into a sink. Reports extents that overlap; verifies nothing."""
    sums = RegionSums(root, sizes, extents, report)
    lock = Lock()

    @contextmanager
    def copying() -> Iterator[Step[FilePiece]]:
        with OpenFiles(root, in_order=True) as files:

            def step(piece: FilePiece) -> None:
                data = new_piece_buffer(piece.length)
                is_recalled = sink.try_read_back(piece, data)
                if not is_recalled and data:
                    files[piece.name].read_into(data, piece.start)
                total = 0
                for region, start, stop in sums.inside(piece.name, piece.start, piece.length):
                    crc = crc32(data[start - piece.start : stop - piece.start])
                    total = combine_crc32(total, crc, stop - start)
                    with lock:
                        sums.add(region, start, stop, crc)
                if not is_recalled:
                    sink.put(piece, data, total)
                if progress:
                    with lock:
                        progress(piece.length)

            try:
                yield step
            except BaseException as error:
                sink.stop(error)
                raise

    process_units(
        (piece for name, size in sizes.items() for piece in cut_into_pieces(name, size)), copying, jobs or JOBS
    )
    return sums.result()


def scan_files(
    root: Path,
    sizes: Mapping[str, int],
    extents: Iterable[Extent],
    report: Report,
    *,
    jobs: int | None = None,
    progress: BytesDone | None = None,
) -> Scanned:
    """Read files from end to end. Reports unreadable files and extents that overlap; verifies nothing."""
    sums = RegionSums(root, sizes, extents, report)
    reporting = Lock()

    def inside(block: Block) -> list[tuple[Extent, int, int]]:
        return sums.inside(block.target.chunk.path, block.start, block.nbytes)

    def sum_block(worker: Worker, block: Block) -> list[int]:
        try:
            data = worker.read_stored_bytes(block)
        except CkptError as error:
            with reporting:
                report(error.blame(tensor=inside(block)[0][0].name or None).with_traceback(None))
            return []
        return [crc32(data[start - block.start : stop - block.start]) for _, start, stop in inside(block)]

    def record(block: Block, crcs: list[int], _pieces: Pieces) -> None:
        if not crcs:
            return  # it could not be read
        for (region, start, stop), crc in zip(inside(block), crcs, strict=True):
            sums.add(region, start, stop, crc)
        if progress:
            progress(block.nbytes)

    visit_blocks(plan_range_reads(root, ((path, 0, size) for path, size in sizes.items())), sum_block, record, jobs)
    return sums.result()


def file_checksum(root: Path, path: str, size: int, extents: Iterable[Extent]) -> int:
    """Return the CRC-32 of a file of `size` bytes. Reads only the bytes between the extents that have a CRC-32."""
    sums: Checksums[str] = Checksums()
    with closing(Gatherer(root)) as source:
        for region in regions_of_file(
            root, path, size, (extent for extent in extents if extent.crc32 is not None), skip_problem
        ):
            crc = source.checksum(path, region.offset, region.length) if region.crc32 is None else region.crc32
            sums.add(path, region.offset, region.length, crc)
    crc_of_file = sums.find_complete_crc(path, size)
    assert crc_of_file is not None, "regions leave no gap"
    return crc_of_file


def find_first_zero_page(root: Path, extent: Extent) -> int | None:
    """Return the offset in the file of the first page of zeros in an extent, None if it has no such page."""
    with OpenFiles(root, in_order=True) as files:
        for start in range(extent.offset, extent.offset + extent.length, BLOCK_BYTES):
            length = min(BLOCK_BYTES, extent.offset + extent.length - start)
            at = read_at(files[extent.path], length, start).find(bytes(min(_PAGE, length)))
            if at >= 0:
                return start + at
    return None


def extents_by_file(paths: Iterable[str], extents: Iterable[Extent]) -> dict[str, list[Extent]]:
    by_path: dict[str, list[Extent]] = {path: [] for path in paths}
    for extent in extents:
        if extent.path in by_path:
            by_path[extent.path].append(extent)
    return by_path


def regions_of_file(root: Path, name: str, size: int, extents: Iterable[Extent], report: Report) -> list[Extent]:
    """Return the regions of a file of `size` bytes, in order and without gaps.

    Regions are the extents, and nameless regions between them. The file is called `name` in directory `root`. Equal
    extents become one region. An extent that overlaps another, or the end of the file, is reported and skipped.
    """
    regions: list[Extent] = []
    at = 0
    for extent in sorted(extents, key=lambda extent: (extent.offset, extent.length)):
        end = extent.offset + extent.length
        is_same = bool(regions) and (regions[-1].offset, regions[-1].length) == (extent.offset, extent.length)
        if is_same or not extent.length:
            continue
        if extent.offset < at or end > size:
            fault = "overlap the data that ends" if extent.offset < at else "end after the end of the file,"
            what = f"{fault} at byte {at if extent.offset < at else size}"
            message = f"the {extent.length} bytes at byte {extent.offset} {what}"
            report(Corrupt(message, path=root / name, tensor=extent.name or None, offset=extent.offset))
            continue
        if extent.offset > at:
            regions.append(Extent(extent.path, at, extent.offset - at, None, ""))
        regions.append(extent)
        at = end
    if at < size:
        regions.append(Extent(name, at, size - at, None, ""))
    return regions


def overlapping_regions(regions: list[Extent], start: int, stop: int) -> Iterator[tuple[Extent, int, int]]:
    """Yield the regions that overlap bytes `start:stop` of the file, each with the offsets of the overlap."""
    first = bisect_right(regions, start, key=lambda region: region.offset) - 1
    for i in range(max(first, 0), len(regions)):  # an empty file has no region
        region = regions[i]
        if region.offset >= stop:
            return
        yield region, max(start, region.offset), min(stop, region.offset + region.length)
