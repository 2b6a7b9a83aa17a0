"""Verify whole files with the CRC-32 in a manifest, using the byte ranges that a conversion read anyway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ckptkit.engine.ledger import SourcePlace
from ckptkit.engine.scan import file_checksum
from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import RESTORE, Checksums, damage_message
from ckptkit.io.file import file_size
from ckptkit.layout import Extent, Layout

# The most that is read in addition to complete a file: its header, and bytes that the conversion does not need.
_MISSING_DIVISOR = 8  # at most 1/8 of the file
_MISSING_BYTES = 1 << 16  # bytes

SourceFile = tuple[int, str]  # index of a source in the plan, file


def verify_files_read(
    layouts: Sequence[Layout], read: Checksums[SourcePlace], files: Mapping[SourceFile, int]
) -> tuple[int, list[Path]]:
    """Verify `files` of sources with their CRC-32, where nearly all of a file was read.

    `files` has the requested bytes of each file. Returns how many of these bytes were verified, and the files that were
    not. Raises `Corrupt` for a file that differs.
    """
    ranges: dict[SourceFile, list[Extent]] = {}
    for (number, path, offset), start, length, crc in read:
        if (number, path) in files:
            ranges.setdefault((number, path), []).append(Extent(path, offset + start, length, crc, ""))
    compared = 0
    uncompared = []
    for (number, path), nbytes in files.items():
        if try_verify_file(layouts[number], path, ranges.get((number, path), ())):
            compared += nbytes
        else:
            uncompared.append(layouts[number].root / path)
    return compared, uncompared


def verify_nearly_covered_files(layout: Layout) -> None:
    """Verify each file with its CRC-32 where the CRC-32 of chunks cover nearly all of it. Reads the other bytes."""
    for path, ranges in chunk_ranges_of_summed_files(layout).items():
        if ranges:
            try_verify_file(layout, path, ranges)


def verify_covered_files(layout: Layout) -> None:
    """Verify each file in which every chunk has a CRC-32. Reads only the bytes between the chunks."""
    chunks = (chunk for tensor in layout.tensors.values() for chunk in tensor.chunks)
    unknown = {chunk.path for chunk in chunks if chunk.where or chunk.crc32 is None}
    for path, ranges in chunk_ranges_of_summed_files(layout).items():
        if not ranges or path in unknown:
            continue
        try:
            try_verify_file(layout, path, ranges, most_between=layout.file_sums[path][0])
        except Corrupt as error:
            message = "expected the file that the manifest describes, found one of another save or rank"
            raise Corrupt(message, path=layout.root / path, hint=RESTORE) from error


def chunk_ranges_of_summed_files(layout: Layout) -> dict[str, list[Extent]]:
    """Return the byte ranges of chunks that have a CRC-32, for each file that has one."""
    ranges: dict[str, dict[int, Extent]] = {path: {} for path in layout.file_sums}
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            if chunk.path in ranges and chunk.crc32 is not None and not chunk.where:
                offset, length = chunk.checksummed_range
                ranges[chunk.path][offset] = Extent(chunk.path, offset, length, chunk.crc32, name)
    return {path: list(by_offset.values()) for path, by_offset in ranges.items()}


def try_verify_file(layout: Layout, path: str, ranges: Iterable[Extent], most_between: int | None = None) -> bool:
    """Return whether a file could be compared with the CRC-32 in the layout.

    `ranges` are byte ranges with a known CRC-32. A file is not compared if more than `most_between` bytes are outside
    these ranges; the default limit is a small fraction of the file. Raises `Corrupt` if the file differs.
    """
    nbytes, recorded = layout.file_sums[path]
    if (size := file_size(layout.root / path)) != nbytes:
        message = f"expected {nbytes} bytes (manifest), found {size}"
        raise Corrupt(message, path=layout.root / path, hint=RESTORE)
    ordered = sorted(ranges, key=lambda extent: extent.offset)
    ends = [0, *(extent.offset + extent.length for extent in ordered)]
    if any(extent.offset < end for extent, end in zip(ordered, ends, strict=False)):
        return False
    between = nbytes - sum(extent.length for extent in ordered)
    if not 0 <= between <= (max(nbytes // _MISSING_DIVISOR, _MISSING_BYTES) if most_between is None else most_between):
        return False
    crc = file_checksum(layout.root, path, nbytes, ordered)
    if crc != recorded:
        raise Corrupt(damage_message(nbytes, 0, crc, recorded), path=layout.root / path, hint=RESTORE)
    return True
