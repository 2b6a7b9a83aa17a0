"""Sums: the CRC-32 of a whole from what each of many hands knows of the parts that it wrote. Reads no file.

But for the inversions at its two ends a CRC is linear: that of a whole is the XOR of those of its parts, each taken as
though all other bytes were 0. So a rank that wrote ten thousand columns of a tensor has one number to tell.
"""

from __future__ import annotations

from isal import isal_zlib

_ONES = 0xFFFFFFFF


def part_sum(data: memoryview, after: int) -> int:
    """What `data`, with `after` bytes to follow it in the whole, adds to the sum of the parts, by XOR."""
    return isal_zlib.crc32_combine(isal_zlib.crc32(data, _ONES) ^ _ONES, 0, after)


def whole_crc32(parts: int, length: int) -> int:
    """The CRC-32 of a whole of `length` bytes from the sum of all its parts, none of which overlap."""
    return isal_zlib.crc32_combine(_ONES, 0, length) ^ _ONES ^ parts
