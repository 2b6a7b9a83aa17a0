"""Compute CRC-32: of bytes, of a byte range from pieces in any order, of a file that many ranks wrote.

Apart from the inversions at both ends, CRC-32 is linear: the CRC of a whole is the XOR of the CRCs of its parts, each
computed as if all other bytes were 0. So a rank that wrote ten thousand columns of a tensor only has to report one
number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from isal import isal_zlib

Key = TypeVar("Key", bound=Hashable)
_ONES = 0xFFFFFFFF


def crc32(data: bytes | bytearray | memoryview, starting_crc: int = 0) -> int:
    """Return the CRC-32 of `data`, as in zip and PNG; `starting_crc` is the CRC-32 of the bytes in front of it."""
    return isal_zlib.crc32(data, starting_crc)


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of concatenated bytes, from the CRC-32 of both parts and the length of the second."""
    return isal_zlib.crc32_combine(first, second, length)


RESTORE = "restore the file from a copy, or run `ckptkit manifest CKPT --overwrite` if you changed it on purpose"


def damage_message(length: int, offset: int, found: int | None, recorded: int | None) -> str:
    expected = f"expected CRC-32 {recorded:08x} of the {length} bytes at byte {offset}"
    return f"{expected}, found {found:08x}: these bytes are damaged"


class Checksums(Generic[Key]):
    """The CRC-32 of many byte ranges, each with a key, combined piece by piece.

    Adjacent pieces are merged as they arrive, so memory only grows with the disorder.
    """

    def __init__(self) -> None:
        self._pieces: dict[Key, list[tuple[int, int, int]]] = {}  # (start, stop, crc), sorted, never adjacent

    def add(self, key: Key, start: int, length: int, crc: int) -> None:
        """Add the CRC-32 of bytes `start:start + length` of range `key`.

        A piece replaces the pieces that it covers; tied tensors are written twice. Ignores any other piece that
        overlaps.
        """
        pieces = self._pieces.setdefault(key, [])
        stop = start + length
        low = high = bisect_left(pieces, (start, 0, 0))
        while high < len(pieces) and pieces[high][1] <= stop:
            high += 1
        before = pieces[low - 1] if low else (0, -1, 0)
        after = pieces[high] if high < len(pieces) else (stop + 1, 0, 0)
        if length == 0 or before[1] > start or after[0] < stop:
            return
        # merge with the piece that ends where this one starts, and with the piece that starts where it ends
        if before[1] == start:
            low, start, crc = low - 1, before[0], isal_zlib.crc32_combine(before[2], crc, length)
        if after[0] == stop:
            high, stop, crc = high + 1, after[1], isal_zlib.crc32_combine(crc, after[2], after[1] - after[0])
        pieces[low:high] = [(start, stop, crc)]

    def find_complete_crc(self, key: Key, length: int) -> int | None:
        """Return the CRC-32 of the complete range of `length` bytes, or None while a part of it is missing."""
        if length == 0:
            return 0
        start, stop, crc = self._pieces.get(key, [(0, 0, 0)])[0]
        return crc if (start, stop) == (0, length) else None

    def missing_ranges(self, key: Key, length: int) -> Iterator[tuple[int, int]]:
        """Yield start and length of each part of a range of `length` bytes that has not been added."""
        at = 0
        for start, stop, _ in [*self._pieces.get(key, ()), (length, length, 0)]:
            if at < start:
                yield at, start - at
            at = stop

    def __iter__(self) -> Iterator[tuple[Key, int, int, int]]:
        """Yield each merged piece: key, start, length, CRC-32."""
        for key, pieces in self._pieces.items():
            for start, stop, crc in pieces:
                yield key, start, stop - start, crc

    def drop_range(self, key: Key) -> None:
        self._pieces.pop(key, None)


def xor_contribution(data: memoryview, nbytes_after: int) -> int:
    """Return the contribution of `data` to the XOR of all parts, if `nbytes_after` bytes follow it in the whole."""
    return isal_zlib.crc32_combine(isal_zlib.crc32(data, _ONES) ^ _ONES, 0, nbytes_after)


def crc32_from_contributions(contributions: int, length: int) -> int:
    """Return the CRC-32 of `length` bytes from the XOR of the contributions of all parts, which do not overlap."""
    return isal_zlib.crc32_combine(_ONES, 0, length) ^ _ONES ^ contributions
