"""Verify what was read of the sources with their recorded CRC-32, once a byte range or a whole file is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.engine.ledger import Ledger, SourcePlace, locate_in_checksummed_range
from ckptkit.engine.scan import file_checksum
from ckptkit.errors import DAMAGED, Corrupt
from ckptkit.io.crc32 import RESTORE, Checksums, damage_message
from ckptkit.io.file import file_size
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, ReadRun
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.plan import Plan, Target, in_file_order, self_copy_target

# A file, or a byte range that several chunks share, is read beyond the requested chunks only if little is missing.
_MISSING_DIVISOR = 8  # at most 1/8 of the bytes may be missing
_MISSING_BYTES = 1 << 16  # bytes that may be missing of a short range, whatever its length

SourceFile = tuple[int, str]  # index of a source in the plan, file


class Sources:
    """The byte ranges that a plan reads, and which of them were read completely and match their recorded CRC-32.

    A byte range is a chunk, or the storage that several chunks share. `is_all` says that nothing but this plan reads
    the ranges: a range that the plan does not read completely is then left unchecked. Reads are added to the `ledger`.
    """

    @collector_paused()
    def __init__(self, plan: Plan, ledger: Ledger | None = None, *, is_all: bool = False) -> None:
        self._plan = plan
        runs: dict[SourcePlace, tuple[str, Chunk]] = {}
        nbytes: Counter[SourcePlace] = Counter()  # of each range, by copies; bytes that are read twice count twice
        for target in plan.targets:
            for copy in target.copies:
                if copy.src.where is not None:
                    continue
                place = copy.source, copy.src.path, copy.src.checksummed_range[0]
                name = target.name if target.recipe is None else target.recipe.operands[copy.operand].name
                runs[place] = name, copy.src
                if is_all or copy.src.run is not None:
                    nbytes[place] += copy.region.numel * copy.src.dtype.itemsize
        self._waiting = {
            place: (name, chunk)
            for place, (name, chunk) in runs.items()
            if chunk.crc32 is not None and not (is_all and nbytes[place] < chunk.checksummed_range[1])
        }
        # the ledger may have reads of an earlier call, which count too
        self._read = Ledger().read if ledger is None else ledger.read
        # all of a chunk's own range, but only the bytes read of a shared one
        self._requested = {
            place: chunk.checksummed_range[1] if chunk.run is None else min(chunk.checksummed_range[1], nbytes[place])
            for place, (_, chunk) in runs.items()
        }
        self._verified: set[SourcePlace] = set()
        self.checked_bytes = 0
        # a resumed ledger may have complete ranges already
        for place in [place for place, *_ in self._read if place in self._waiting]:
            self._compare_if_complete(place)

    @property
    def unchecked_bytes(self) -> int:
        """Return how many of the requested bytes have not been verified with a CRC-32."""
        return sum(self._requested.values()) - self.checked_bytes

    @property
    def unchecked_in_checksummed_files(self) -> Counter[tuple[int, str]]:
        """Return the unchecked bytes by source and file, for files that have one CRC-32 for the whole file."""
        unchecked: Counter[tuple[int, str]] = Counter()
        for place, nbytes in self._requested.items():
            number, path, _ = place
            if nbytes and place not in self._verified and path in self._plan.sources[number].file_sums:
                unchecked[number, path] += nbytes
        return unchecked

    def is_awaiting_comparison(self, source_index: int, chunk: Chunk) -> bool:
        """Return whether the recorded CRC-32 of a chunk's byte range is still to be compared."""
        return (source_index, *range_start_of(chunk)) in self._waiting

    def is_checksum_needed(self, source_index: int, chunk: Chunk) -> bool:
        """Return whether the CRC-32 of a chunk's bytes is needed, now or once its file has been read completely."""
        return chunk.path in self._plan.sources[source_index].file_sums or self.is_awaiting_comparison(
            source_index, chunk
        )

    def record_reads(self, pieces: Sequence[Iterable[ReadRun]]) -> None:
        """Record the reads from each source. Raises `Corrupt` if a range is complete now and its CRC-32 differs."""
        for number, of_source in enumerate(pieces):
            for piece in of_source:
                path, offset, start = locate_in_checksummed_range(piece.chunk, piece.start)
                place = number, path, offset
                if place in self._waiting:
                    assert piece.crc is not None, "`is_awaiting_comparison` asks for it"
                    self._read.add(place, start, piece.length, piece.crc)
                    self._compare_if_complete(place)

    def move_shared_reads_to(self, ledger: Ledger) -> None:
        """Hand reads of incomplete shared ranges to a ledger of several reads. Raises `Corrupt` if a CRC-32 differs."""
        unfinished = [place for place, (_, chunk) in self._waiting.items() if chunk.run is not None]
        for place, *piece in self._read:
            if place in unfinished:
                ledger.read.add(place, *piece)
        for place in unfinished:
            self._compare_if_complete(place, ledger)
            if place not in self._waiting:
                ledger.read.drop_range(place)

    def _compare_if_complete(self, place: SourcePlace, ledger: Ledger | None = None) -> None:
        name, chunk = self._waiting[place]
        offset, length = chunk.checksummed_range
        crc = (self._read if ledger is None else ledger.read).find_complete_crc(place, length)
        if crc is None:
            return
        if crc != chunk.crc32:
            raise Corrupt(
                damage_message(length, offset, crc, chunk.crc32),
                path=self._plan.sources[place[0]].root / chunk.path,
                tensor=name,
            )
        self.checked_bytes += self._requested[place]
        self._verified.add(place)
        del self._waiting[place]

    def plan_unread_ranges(self) -> Plan:
        """Return the plan with the rest of each range with a CRC-32, unless little of a shared one was requested."""
        targets: list[Target] = []
        for place, (name, chunk) in self._waiting.items():
            run = offset, length = chunk.checksummed_range
            if length - self._requested[place] > max(length // _MISSING_DIVISOR, _MISSING_BYTES):
                continue
            for start, missing in self._read.missing_ranges(place, length):
                gap = Chunk(full_box((missing,)), chunk.path, offset + start, missing, DTYPES["uint8"], run=run)
                targets.append(self_copy_target(name, gap, place[0]))
        return replace(self._plan, targets=in_file_order(targets))


def range_start_of(chunk: Chunk) -> FileOffset:
    """Return the file and offset that identify the byte range of a chunk."""
    return chunk.path, chunk.checksummed_range[0]


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


def verify_mostly_checksummed_files(layout: Layout) -> None:
    """Verify each file with its CRC-32 where the CRC-32 of chunks cover nearly all of it. Reads the other bytes."""
    for path, ranges in checksummed_ranges_by_file(layout).items():
        if ranges:
            try_verify_file(layout, path, ranges)


def find_files_of_other_saves(layout: Layout) -> dict[str, Corrupt]:
    """Return an error for each file that differs from its CRC-32, although each of its chunks has a CRC-32.

    Reads only the bytes between the chunks.
    """
    chunks = (chunk for tensor in layout.tensors.values() for chunk in tensor.chunks)
    unknown = {chunk.path for chunk in chunks if chunk.where or chunk.crc32 is None}
    errors = {}
    for path, ranges in checksummed_ranges_by_file(layout).items():
        if not ranges or path in unknown:
            continue
        try:
            try_verify_file(layout, path, ranges, max_uncovered=layout.file_sums[path][0])
        except Corrupt:
            message = "expected the file that the manifest describes, found one of another save or rank"
            errors[path] = Corrupt(message, path=layout.root / path, hint=DAMAGED)
    return errors


def checksummed_ranges_by_file(layout: Layout) -> dict[str, list[Extent]]:
    """Return the byte ranges of chunks that have a CRC-32, for each file that has one."""
    ranges: dict[str, dict[int, Extent]] = {path: {} for path in layout.file_sums}
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            if chunk.path in ranges and chunk.crc32 is not None and not chunk.where:
                offset, length = chunk.checksummed_range
                ranges[chunk.path][offset] = Extent(chunk.path, offset, length, chunk.crc32, name)
    return {path: list(by_offset.values()) for path, by_offset in ranges.items()}


def try_verify_file(layout: Layout, path: str, ranges: Iterable[Extent], max_uncovered: int | None = None) -> bool:
    """Return whether a file could be compared with the CRC-32 in the layout.

    `ranges` are byte ranges with a known CRC-32. A file is not compared if more than `max_uncovered` bytes are outside
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
    if (
        not 0
        <= between
        <= (max(nbytes // _MISSING_DIVISOR, _MISSING_BYTES) if max_uncovered is None else max_uncovered)
    ):
        return False
    crc = file_checksum(layout.root, path, nbytes, ordered)
    if crc != recorded:
        raise Corrupt(damage_message(nbytes, 0, crc, recorded), path=layout.root / path, hint=RESTORE)
    return True
