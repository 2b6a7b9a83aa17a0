"""Scan the opcodes of a pickle, and rewrite the opcodes that could harm Python's own unpickler. Runs none of them.

The unpickler, which is written in C, trusts its input. It allocates as many bytes, or memo entries, as a pickle
requests. And it hashes the keys of dicts and the members of sets, which for nested tuples can take forever, or exhaust
the stack. So a length is compared with the bytes that are there; opcodes for an empty dict or set are replaced by a
call of `persistent_load`, which returns a safe container; and an opcode that torch does not write is refused. Source:
https://github.com/python/cpython/blob/3.13/Lib/pickletools.py
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import RawIOBase
from itertools import islice
from typing import Any, Protocol

from ckptkit.errors import Unsupported

# `persistent_load` gets None for an empty dict, () for an empty set, and for any other id a 1-tuple of the id
_CALLS = {b"}": b"NQ", b"\x8f": b")Q", b"Q": b"\x85Q"}  # EMPTY_DICT, EMPTY_SET, BINPERSID
_STOP, _FRAME, _LONG_BINPUT = b".", b"\x95", b"r"
APPENDS = b"e"  # replaces SETITEMS and BUILD of a flat instance, which has no EMPTY_DICT
_SHORTER = 2  # bytes by which a flat instance is shorter
_AT_ONCE = 64  # pieces that are joined per read
# opcode: width of its length in bytes
_COUNTED = {0x8C: 1, 0x58: 4, 0x55: 1, 0x54: 4, 0x43: 1, 0x42: 4, 0x8A: 1, 0x8D: 8, 0x8E: 8}
_FIXED = b"KhqMJjGc\x80"  # opcodes with operands of fixed size
_ALWAYS = rb"()NRt\x81\x85-\x89\x93\x94"  # opcodes of one byte, as a pattern
_NOT_IN_STATES = rb"01abesu\]\x90\x92"  # opcodes that change values below the top of the stack, or create a list
_WINDOW = 1 << 14  # bytes per search for instances
_WINDOW_BETWEEN_TABLES = 1 << 10  # small, so that few instances are missed by the tables
SHORT = 96  # bytes of a string; longer ones are skipped one at a time


def length_prefixed_pattern(opcode: bytes, width: int, longest: int) -> bytes:
    """Return the pattern of an opcode with a length of `width` bytes and as many bytes as the length says."""
    lengths = (re.escape(n.to_bytes(width, "little")) + b".{%d}" % n for n in range(longest + 1))
    return opcode + b"(?:" + b"|".join(lengths) + b")"


_OPERANDS = b"|".join(
    (
        rb"[Kh\x80].|M..|[Jj]....|G.{8}|c[^\n]*+\n[^\n]*+\n",
        length_prefixed_pattern(b"\x8c", 1, SHORT),
        length_prefixed_pattern(b"\x8a", 1, 8),
    )
)
# pattern of the allowed opcodes with operands, except BINPUTs
WITH_OPERANDS = b"%b|%b" % (_OPERANDS, length_prefixed_pattern(b"X", 4, SHORT))


class TableReader(Protocol):
    """Reads consecutive instances of one class into tables while a pickle is rewritten: `tables.Tables`."""

    def record_unchanged_opcodes(self, start: int, end: int) -> None:
        """Note that the opcodes between two offsets are passed on unchanged."""

    def instance_replacements_at(self, heads: Iterable[bytes], start: int, at: int) -> Generator[bytes, None, int]:
        """Yield replacements for the instances at an offset. Returns the offset after them."""

    def table_columns(
        self, table_number: int, fetched: Sequence[Any], torch_size: Any
    ) -> Sequence[Mapping[str, Sequence[Any]]] | None:
        """Return the columns of a table by name, for keys and values; None if the fetched values do not fit a table."""


class SanitizedPickle(RawIOBase):
    """A harmless pickle with the same meaning as the pickle at byte `at` of `data`. It is rewritten while it is read.

    With `is_flat` an object's state is not a dict: its keys and values are appended to the object in turn. With
    `tables` many consecutive instances become one call that returns a table. `end` is the offset after the pickle, once
    all of it was read. Reading raises `Unsupported` for an opcode that torch does not write, `IndexError` for a
    truncated pickle.
    """

    def __init__(self, data: bytes, at: int, *, is_flat: bool = False, tables: TableReader | None = None) -> None:
        self.end = at
        self._pieces = self._rewrite(data, at, is_flat=is_flat, tables=tables)
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Write the next bytes into a buffer; return how many, 0 at the end."""
        if not self._waiting:
            self._waiting = memoryview(b"".join(islice(self._pieces, _AT_ONCE)))
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count

    def _rewrite(self, data: bytes, at: int, *, is_flat: bool, tables: TableReader | None) -> Iterator[bytes]:
        """Yield the rewritten pickle in non-empty pieces."""
        allowed = allowed_sequence_pattern()
        instances = flat_instance_pattern() if is_flat else None  # compile only if needed: it takes milliseconds
        window = _WINDOW_BETWEEN_TABLES if tables else _WINDOW
        done = at
        while True:
            start = at
            flat_ones = instances.findall(data, at, at + window) if instances else []
            if flat_ones and flat_ones[-1][-1]:
                del flat_ones[-1]
            if flat_ones:
                flat = APPENDS.join(map(b"".join, flat_ones)) + APPENDS
                yield data[done:at] + flat
                at = done = at + len(flat) + _SHORTER * len(flat_ones)
                if tables:
                    at = done = yield from tables.instance_replacements_at(
                        (before for before, *_ in flat_ones), start, at
                    )
                continue
            at = next(allowed.finditer(data, at)).end()
            if tables:
                tables.record_unchanged_opcodes(start, at)
            if data[at : at + 1] == _STOP:
                break
            replacement, end = replacement_opcode(data, at)
            if replacement is not None:
                if done < at or replacement:
                    yield data[done:at] + replacement
                done = end
            at = end
        self.end = at + 1
        yield data[done : at + 1]


def replacement_opcode(data: bytes, at: int) -> tuple[bytes | None, int]:
    """Return the replacement of the opcode at byte `at`, None if it is allowed, and the offset after it."""
    opcode = data[at : at + 1]
    replacement = _CALLS.get(opcode)
    if replacement is not None:
        return replacement, at + 1
    if opcode == _FRAME:
        end_of_length_prefixed(data, at + 1, 8)
        return b"", at + 9
    if opcode == _LONG_BINPUT:
        # a valid memo never has more entries than the pickle has bytes
        if int.from_bytes(data[at + 1 : at + 5], "little") > len(data):
            raise IndexError(at)
        return None, at + 5
    if not opcode or opcode in _FIXED:
        raise IndexError(at)
    width = _COUNTED.get(opcode[0])
    if width is None:
        raise Unsupported(f"damaged or not torch's: unknown pickle opcode 0x{opcode[0]:02x} at byte {at}")
    return None, end_of_length_prefixed(data, at + 1, width)


def end_of_length_prefixed(data: bytes, at: int, width: int) -> int:
    """Return the end of a length of `width` bytes and as many bytes as it says. Raises `IndexError` for fewer bytes."""
    end = at + width + int.from_bytes(data[at : at + width], "little")
    if end > len(data):
        raise IndexError(at)
    return end


@cache
def allowed_sequence_pattern() -> re.Pattern[bytes]:
    return re.compile(b"%b*+" % allowed_opcode_pattern(_ALWAYS + _NOT_IN_STATES, WITH_OPERANDS), re.DOTALL)


@cache
def flat_instance_pattern() -> re.Pattern[bytes]:
    """Return the pattern of an object whose state is a dict.

    Its groups are the opcodes before the dict, the dict's items, and, without such an object, the remaining bytes.
    Strings must be as protocol 4 writes them.
    """
    before, items = (
        allowed_opcode_pattern(_ALWAYS + _NOT_IN_STATES, _OPERANDS),
        allowed_opcode_pattern(_ALWAYS, _OPERANDS),
    )
    return re.compile(rb"(%b*+)\}(\x94?\(%b*+)ub|(.).*" % (before, items), re.DOTALL)


def allowed_opcode_pattern(single: bytes, others: bytes) -> bytes:
    """Return the pattern of allowed opcodes: these single-byte ones, and those with operands."""
    return rb"(?:[%b]++|q.|r..\0\0|%b)" % (single, others)
