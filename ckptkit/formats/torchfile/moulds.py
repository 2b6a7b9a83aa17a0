"""Locate the tensors of many archives quickly: most differ from one before in the tensor and its checksums only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptkit.formats.torchfile.read_archive import GLANCE, Entry, Located, ReadAt, open_archive

_MOST = 4096  # moulds that are kept at once
_SERIAL = ".data/serialization_id"  # a number that torch makes of all checksums

Span = tuple[int, int]


class Moulds:
    """The last archive of each length that was read, to compare the next of that length with."""

    def __init__(self) -> None:
        self._kept: dict[int, Mould] = {}

    def locate(self, read: ReadAt, length: int) -> Located:
        """Find the one tensor of an archive of `length` bytes.

        Raises `Corrupt`, or `Unsupported` naming what it holds.
        """
        known = self._kept.get(length)
        fitting = known.fit(read, length) if known is not None else None
        if fitting is not None:
            return fitting
        found, entries = open_archive(read, length)
        made = make_mould(read, length, found, entries)
        if made is not None:
            if len(self._kept) == _MOST:
                self._kept.clear()
            self._kept[length] = made
        return found


@dataclass(frozen=True, slots=True)
class Mould:
    """The bytes before and behind the tensor of an archive, in which it was `found`.

    Another archive fits if it has the same `head`, and behind its tensor the `same` bytes, each from an offset in the
    `tail`. Checksums stand there twice, at the `pairs` of spans; the first is that of the tensor.
    """

    head: bytes
    tail: int
    same: tuple[tuple[int, bytes], ...]
    pairs: tuple[tuple[Span, Span], ...]
    found: Located

    def fit(self, read: ReadAt, length: int) -> Located | None:
        """Return where the tensor of an archive of this length lies, None if the archive does not fit."""
        if read(0, len(self.head)) != self.head:
            return None
        tail = read(length - self.tail, self.tail)
        for start, wanted in self.same:
            if not tail.startswith(wanted, start):
                return None
        for (start, stop), (again, end) in self.pairs:
            if tail[start:stop] != tail[again:end]:
                return None
        (start, stop), _ = self.pairs[0]
        tensor, offset, nbytes, strides, *_ = self.found
        return Located(tensor, offset, nbytes, strides, int.from_bytes(tail[start:stop], "little") or None)


def make_mould(read: ReadAt, length: int, found: Located, entries: Mapping[str, Entry]) -> Mould | None:
    """Return the mould of an archive; None where its tensor is not all of its storage, or more is about it than usual.

    The number that torch makes of all checksums is told by them, and may differ too.
    """
    storage, serial = entries[f"data/{found.tensor.key}"], entries.get(_SERIAL)
    begin = storage.offset + storage.length
    if found.length != storage.length or max(storage.offset, length - begin) > GLANCE:
        return None
    sealed = [storage] if serial is None else [storage, serial]
    pairs = [(span_at(one - begin), span_at(other - begin)) for one, other in (entry.crc_at for entry in sealed)]
    free = [span for pair in pairs for span in pair]
    if serial is not None:
        free.append((serial.offset - begin, serial.offset - begin + serial.length))
    tail = read(begin, length - begin)
    checksums = [entry.crc32.to_bytes(4, "little") for entry in sealed for _ in entry.crc_at]
    if min(free)[0] < 0 or [tail[slice(*span)] for span in free[: len(checksums)]] != checksums:
        return None
    same = tuple((start, tail[start:stop]) for start, stop in between(free, len(tail)))
    return Mould(read(0, storage.offset), len(tail), same, tuple(pairs), found)


def span_at(start: int) -> Span:
    """Return the span of a CRC-32 at an offset."""
    return start, start + 4


def between(spans: Iterable[Span], end: int) -> Iterator[Span]:
    """Yield what lies between spans, and before and behind them, in `0:end`."""
    at = 0
    for start, stop in sorted(spans):
        if start > at:
            yield at, start
        at = max(at, stop)
    if end > at:
        yield at, end
