"""Locate the tensors of many archives quickly: most differ from one before in the tensor and its checksums only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from struct import Struct

from ckptkit.files.ahead import ReadAhead
from ckptkit.formats.archives.read_archive import Located, open_archive
from ckptkit.formats.archives.zip_entries import GLANCE, ReadAt, ZipEntry

_crc32 = Struct("<I")
_MOST = 4096  # templates that are kept at once
_SERIAL = ".data/serialization_id"  # a number that torch makes of all checksums

Span = tuple[int, int]


class ArchiveTemplates:
    """The last archive of each length that was read, to compare the next of that length with."""

    def __init__(self) -> None:
        self._kept: dict[int, ArchiveTemplate] = {}

    def locate(self, files: ReadAhead, path: str, offset: int, length: int) -> Located:
        """Find the one tensor of the archive of `length` bytes at `offset` of a file.

        Raises `Corrupt`, or `Unsupported` naming what it holds.
        """
        known = self._kept.get(length)
        fitting = known.fit(files, path, offset, length) if known is not None else None
        if fitting is not None:
            return fitting
        read = files.inside(path, offset, length)
        found, entries = open_archive(read, length)
        made = make_template(read, length, found, entries)
        if made is not None:
            if len(self._kept) == _MOST:
                self._kept.clear()
            self._kept[length] = made
        return found


@dataclass(frozen=True, slots=True)
class ArchiveTemplate:
    """The bytes before and behind the tensor of an archive, in which it was `found`.

    Another archive fits if it has the same `head`, and behind its tensor the `same` bytes, each from an offset in the
    `tail`. Checksums stand there twice, at the `pairs` of offsets; the first is that of the tensor.
    """

    head: bytes
    tail: int
    same: tuple[tuple[int, bytes], ...]
    pairs: tuple[tuple[int, int], ...]
    found: Located

    def fit(self, files: ReadAhead, path: str, offset: int, length: int) -> Located | None:
        """Return where the tensor of an archive of this length lies, None if the archive does not fit."""
        head, at = files.hold(path, offset, len(self.head))
        if not head.startswith(self.head, at):
            return None
        tail, at = files.hold(path, offset + length - self.tail, self.tail)
        for start, wanted in self.same:
            if not tail.startswith(wanted, at + start):
                return None
        for one, other in self.pairs:
            if _crc32.unpack_from(tail, at + one) != _crc32.unpack_from(tail, at + other):
                return None
        (crc32,) = _crc32.unpack_from(tail, at + self.pairs[0][0])
        tensor, start, nbytes, strides, *_ = self.found
        return Located(tensor, start, nbytes, strides, crc32 or None)


def make_template(read: ReadAt, length: int, found: Located, entries: Mapping[str, ZipEntry]) -> ArchiveTemplate | None:
    """Return the template of an archive, None if its tensor is not all of its storage or more is about it than usual.

    The number that torch makes of all checksums is told by them, and may differ too.
    """
    storage, serial = entries[f"data/{found.tensor.key}"], entries.get(_SERIAL)
    begin = storage.offset + storage.length
    if found.length != storage.length or max(storage.offset, length - begin) > GLANCE:
        return None
    sealed = [storage] if serial is None else [storage, serial]
    pairs = tuple((one - begin, other - begin) for one, other in (entry.crc_at for entry in sealed))
    free = [(start, start + _crc32.size) for pair in pairs for start in pair]
    if serial is not None:
        free.append((serial.offset - begin, serial.offset - begin + serial.length))
    tail = read(begin, length - begin)
    checksums = [_crc32.pack(entry.crc32) for entry in sealed for _ in entry.crc_at]
    if min(free)[0] < 0 or [tail[slice(*span)] for span in free[: len(checksums)]] != checksums:
        return None
    same = tuple((start, tail[start:stop]) for start, stop in between(free, len(tail)))
    return ArchiveTemplate(read(0, storage.offset), len(tail), same, pairs, found)


def between(spans: Iterable[Span], end: int) -> Iterator[Span]:
    """Yield what lies between spans, and before and behind them, in `0:end`."""
    at = 0
    for start, stop in sorted(spans):
        if start > at:
            yield at, start
        at = max(at, stop)
    if end > at:
        yield at, end
