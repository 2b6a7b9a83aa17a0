"""Walk the opcodes of a pickle, and rewrite those by which Python's own unpickler could be harmed. Runs none of them.

The unpickler, which is written in C, trusts what it reads. It sets room aside for whatever number of bytes, or place in
the memo, a pickle names; and it hashes the keys of dicts and the members of sets, which for tuples of tuples can take
for ever, or all of the stack. So a length is compared with the bytes that are there; what makes an empty dict or set is
exchanged for a call of `persistent_load`, which gives one of ours; and an opcode that torch does not write is refused.

Source: https://github.com/python/cpython/blob/3.13/Lib/pickletools.py
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import RawIOBase
from itertools import islice
from typing import Any, Protocol

from ckptkit.errors import Unsupported

# `persistent_load` is called with None for an empty dict, with () for an empty set, and else with a tuple of the id
_CALLS = {b"}": b"NQ", b"\x8f": b")Q", b"Q": b"\x85Q"}  # EMPTY_DICT, EMPTY_SET, BINPERSID
_STOP, _FRAME, _LONG_BINPUT = b".", b"\x95", b"r"
_APPENDS = b"e"  # in the place of SETITEMS and BUILD, of an instance without its EMPTY_DICT
_SHORTER = 2  # bytes that a flat instance is shorter
_AT_ONCE = 64  # pieces that are joined
_COUNTED = {0x8C: 1, 0x58: 4, 0x55: 1, 0x54: 4, 0x43: 1, 0x42: 4, 0x8A: 1, 0x8D: 8, 0x8E: 8}  # bytes of their length
_FIXED = b"KhqMJjGc\x80"  # those with other operands
_ALWAYS = rb"()NRt\x81\x85-\x89\x93\x94"  # opcodes of one byte, as a pattern
_NOT_IN_STATES = rb"01abesu\]\x90\x92"  # those that change what is below them, or make a list
_WINDOW = 1 << 14  # bytes that are searched for instances at once
_WINDOW_BETWEEN_TABLES = 1 << 10  # so that few are not in a table
SHORT = 96  # bytes of text; longer ones are stepped over one by one


def counted(opcode: bytes, width: int, longest: int) -> bytes:
    """Return the pattern of an opcode and the bytes that follow it, their number first, in `width` bytes."""
    lengths = (re.escape(n.to_bytes(width, "little")) + b".{%d}" % n for n in range(longest + 1))
    return opcode + b"(?:" + b"|".join(lengths) + b")"


_OPERANDS = b"|".join(
    (
        rb"[Kh\x80].|M..|[Jj]....|G.{8}|c[^\n]*+\n[^\n]*+\n",
        counted(b"\x8c", 1, SHORT),
        counted(b"\x8a", 1, 8),
    )
)
WITH_OPERANDS = b"%b|%b" % (_OPERANDS, counted(b"X", 4, SHORT))  # those that may stay, as a pattern; but for BINPUTs


class TableReader(Protocol):
    """What reads alike instances into tables, while a pickle is rewritten."""

    def pass_on(self, start: int, end: int) -> None:
        """Note that the opcodes between two offsets are passed on as they are."""

    def follow(self, heads: Iterable[bytes], start: int, at: int) -> Generator[bytes, None, int]:
        """Yield what stands for the alike instances at an offset. Returns the offset after them."""

    def name_it(self, number: int, fetched: Sequence[Any], size: Any) -> Sequence[Mapping[str, Sequence[Any]]] | None:
        """Return the columns of a table by name, of each side; None if what was fetched is not what a table needs."""


class SanitizedPickle(RawIOBase):
    """A pickle that says the same as the one at byte `at` of `data`, but harmlessly: rewritten while it is read.

    With `is_flat` the dict that is an object's state is none: its keys and values in turn are appended to the object.
    With `tables` many alike ones become a call that gives a table. When all has been read, `end` is the offset past the
    pickle. Reading raises `Unsupported` for an opcode that torch does not write, and `IndexError` where the pickle
    breaks off.
    """

    def __init__(self, data: bytes, at: int, *, is_flat: bool = False, tables: TableReader | None = None) -> None:
        self.end = at
        self._pieces = self._rewrite(data, at, is_flat=is_flat, tables=tables)
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Put the next bytes into a buffer; return how many, 0 at the end."""
        if not self._waiting:
            self._waiting = memoryview(b"".join(islice(self._pieces, _AT_ONCE)))
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count

    def _rewrite(self, data: bytes, at: int, *, is_flat: bool, tables: TableReader | None) -> Iterator[bytes]:
        """Yield the pickle in pieces, none of them empty."""
        stay = harmless()
        instances = flat_instances() if is_flat else None  # whose pattern takes milliseconds to compile
        window = _WINDOW_BETWEEN_TABLES if tables else _WINDOW
        done = at
        while True:
            start = at
            found = instances.findall(data, at, at + window) if instances else []
            if found and found[-1][-1]:
                del found[-1]
            if found:
                flat = _APPENDS.join(map(b"".join, found)) + _APPENDS
                yield data[done:at] + flat
                at = done = at + len(flat) + _SHORTER * len(found)
                if tables:
                    at = done = yield from tables.follow((before for before, *_ in found), start, at)
                continue
            at = next(stay.finditer(data, at)).end()
            if tables:
                tables.pass_on(start, at)
            if data[at : at + 1] == _STOP:
                break
            instead, end = replacement_opcode(data, at)
            if instead is not None:
                if done < at or instead:
                    yield data[done:at] + instead
                done = end
            at = end
        self.end = at + 1
        yield data[done : at + 1]


def replacement_opcode(data: bytes, at: int) -> tuple[bytes | None, int]:
    """Return what is to stand in the place of the opcode at byte `at`, None if it may stay, and the offset past it."""
    opcode = data[at : at + 1]
    instead = _CALLS.get(opcode)
    if instead is not None:
        return instead, at + 1
    if opcode == _FRAME:
        past_end(data, at + 9, number(data, at + 1, 8))
        return b"", at + 9
    if opcode == _LONG_BINPUT:
        past_end(data, 0, number(data, at + 1, 4))  # the memo never has more entries than the pickle has bytes
        return None, at + 5
    if not opcode or opcode in _FIXED:
        raise IndexError(at)
    width = _COUNTED.get(opcode[0])
    if width is None:
        raise Unsupported(f"damaged or not torch's: unknown pickle opcode 0x{opcode[0]:02x} at byte {at}")
    start = at + 1 + width
    return None, past_end(data, start, number(data, at + 1, width))


def number(data: bytes, at: int, width: int) -> int:
    return int.from_bytes(data[at : at + width], "little")


def past_end(data: bytes, start: int, length: int) -> int:
    """Return the end of `length` bytes from `start`. Raises `IndexError` if there are fewer."""
    if start + length > len(data):
        raise IndexError(start)
    return start + length


@cache
def harmless() -> re.Pattern[bytes]:
    """Return the pattern of a run of opcodes that may stay."""
    return re.compile(b"%b*+" % allowed_opcodes(_ALWAYS + _NOT_IN_STATES, WITH_OPERANDS), re.DOTALL)


@cache
def flat_instances() -> re.Pattern[bytes]:
    """Return the pattern of an object whose state is a dict: what is before the dict, and its items; else of the rest.

    The third group is of the rest. The texts are those that protocol 4 writes.
    """
    before, items = allowed_opcodes(_ALWAYS + _NOT_IN_STATES, _OPERANDS), allowed_opcodes(_ALWAYS, _OPERANDS)
    return re.compile(rb"(%b*+)\}(\x94?\(%b*+)ub|(.).*" % (before, items), re.DOTALL)


def allowed_opcodes(single: bytes, others: bytes) -> bytes:
    """Return the pattern of opcodes that may stay: these of one byte, and those with operands."""
    return rb"(?:[%b]++|q.|r..\0\0|%b)" % (single, others)
