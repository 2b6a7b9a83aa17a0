"""Pickling: the reverse of `pickles`, for what it can read. A global is only a name and a call only a record here too.

Writes protocol 2, as torch.save does. Each object is written once, however often it occurs, as pickle itself does: what
was read of n bytes is written in a small multiple of n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, Final

from ckptkit.errors import Unsupported
from ckptkit.formats.pickles import Global, PersistentId, Record

_i32, _u32, _f64 = Struct("<i"), Struct("<I"), Struct(">d")
_SMALL_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_BYTES = Global("_codecs", "encode")  # protocol 2 knows no bytes: a call makes them of a string


def dump(value: Any) -> bytes:
    """The pickle of a value as `pickles.load` gives it. Raises `Unsupported` for any other kind, or endless nesting."""
    writer = _Writer()
    try:
        writer.save(value)
    except RecursionError as error:
        raise Unsupported("the value is nested too deep to be pickled") from error
    return bytes(writer.out + b".")


class _Writer:
    __slots__ = ("memo", "out")

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[object, int] = {}  # strings and globals by value, all else by identity

    def save(self, value: Any) -> None:
        save = _SAVES.get(type(value))
        if save is None:
            raise Unsupported(f"a {type(value).__name__} cannot be pickled here")
        save(self, value)

    # constants

    def none(self, _: None) -> None:
        self.out += b"N"

    def boolean(self, value: bool) -> None:
        self.out += b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K%c" % value
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + _i32.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise Unsupported(f"an integer of {len(data)} bytes cannot be pickled here")
            self.out += b"\x8a%c" % len(data) + data

    def floating(self, value: float) -> None:
        self.out += b"G" + _f64.pack(value)

    def string(self, value: str) -> None:
        if not self.recall(value):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + _u32.pack(len(data)) + data
            self.remember(value)

    def bytestring(self, value: bytes) -> None:
        self.name(_BYTES)
        self.string(value.decode("latin-1"))
        self.string("latin1")
        self.out += b"\x86R"

    # containers

    def row(self, value: tuple[Any, ...]) -> None:
        if value and self.recall(id(value)):
            return
        small = _SMALL_TUPLES.get(len(value))
        if small is None:
            self.out += b"("
        for part in value:
            self.save(part)
        self.out += small or b"t"
        if value:
            self.remember(id(value))

    def array(self, value: list[Any]) -> None:
        if not self.recall(id(value)):
            self.out += b"]"
            self.remember(id(value))
            self.members(value)

    def mapping(self, value: dict[Any, Any]) -> None:
        if not self.recall(id(value)):
            self.out += b"}"
            self.remember(id(value))
            self.pairs(value.items())

    def members(self, members: Iterable[Any]) -> None:
        self.out += b"("
        for member in members:
            self.save(member)
        self.out += b"e"

    def pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.out += b"("
        for key, value in pairs:
            self.save(key)
            self.save(value)
        self.out += b"u"

    # what would be imported and called

    def name(self, value: Global) -> None:
        if not self.recall(value):
            self.out += f"c{value.module}\n{value.name}\n".encode()
            self.remember(value)

    def call(self, value: Record) -> None:
        if self.recall(id(value)):
            return
        self.save(value.of)
        self.save(value.args)
        self.out += b"\x81" if value.is_new else b"R"
        self.remember(id(value))
        if value.members is not None:
            self.members(value.members)
        if value.items is not None:
            self.pairs(value.items)
        if value.state is not None:
            self.save(value.state)
            self.out += b"b"

    def persistent(self, value: PersistentId) -> None:
        self.save(value.value)
        self.out += b"Q"

    # memo

    def recall(self, key: object) -> bool:
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h%c" % index if index < 256 else b"j" + _u32.pack(index)
        return True

    def remember(self, key: object) -> None:
        index = self.memo[key] = len(self.memo)
        self.out += b"q%c" % index if index < 256 else b"r" + _u32.pack(index)


_W = _Writer
_SAVES: Final[dict[type, Callable[[_Writer, Any], None]]] = {
    type(None): _W.none, bool: _W.boolean, int: _W.integer, float: _W.floating, str: _W.string, bytes: _W.bytestring,
    tuple: _W.row, list: _W.array, dict: _W.mapping,
    Global: _W.name, Record: _W.call, PersistentId: _W.persistent,
}  # fmt: skip
