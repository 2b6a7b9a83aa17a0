"""Checksums: the CRC-32 of a whole from those of its pieces, whatever order they come in. Reads no file."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from isal import isal_zlib

Key = TypeVar("Key", bound=Hashable)


def crc32(data: bytes | bytearray | memoryview) -> int:
    """CRC-32 of `data`, as zip and PNG compute it."""
    return isal_zlib.crc32(data)


class Checksums(Generic[Key]):
    """CRC-32 of many byte ranges, each known by a key, gathered piece by piece.

    Neighbouring pieces are merged as they come, so what is held stays as small as the disorder.
    """

    def __init__(self) -> None:
        self._pieces: dict[Key, dict[int, tuple[int, int]]] = {}  # key -> start -> (stop, crc)
        self._starts: dict[Key, dict[int, int]] = {}  # key -> stop -> start

    def add(self, key: Key, start: int, length: int, crc: int) -> None:
        """Bytes `start:start + length` of the range `key` have CRC-32 `crc`."""
        if length == 0:
            return
        pieces = self._pieces.setdefault(key, {})
        starts = self._starts.setdefault(key, {})
        stop = start + length
        if start in starts:
            before = starts.pop(start)
            crc = isal_zlib.crc32_combine(pieces.pop(before)[1], crc, length)
            start = before
        if stop in pieces:
            after, crc_after = pieces.pop(stop)
            del starts[after]
            crc = isal_zlib.crc32_combine(crc, crc_after, after - stop)
            stop = after
        pieces[start] = (stop, crc)
        starts[stop] = start

    def whole(self, key: Key, length: int) -> int | None:
        """CRC-32 of the whole range of `length` bytes, or None while a part of it is missing."""
        if length == 0:
            return 0
        stop, crc = self._pieces.get(key, {}).get(0, (0, 0))
        return crc if stop == length else None

    def forget(self, key: Key) -> None:
        """Drop what was gathered of the range `key`."""
        self._pieces.pop(key, None)
        self._starts.pop(key, None)
