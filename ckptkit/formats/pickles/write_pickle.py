"""Write pickles of the values that `inert_pickle` reads: globals are only names and calls only records here too.

Writes protocol 2, as torch.save does. Each object is written once and then fetched from the memo, as in pickle itself,
so the output of a value read from n bytes is at most a small multiple of n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, Final

from ckptkit.errors import Unsupported
from ckptkit.formats.pickles.inert_pickle import Dict, Global, PersistentId, Record
from ckptkit.layout import DTypeKey, NumberKey, TuplePlace

_i32, _u32, _f64 = Struct("<i"), Struct("<I"), Struct(">d")
_SMALL_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_BYTES = Global("_codecs", "encode")  # protocol 2 has no bytes: a call encodes a string
_GETATTR = Global("__builtin__", "getattr")


def dump(value: Any) -> bytes:
    """Return the pickle of a value from `inert_pickle.load`. Raises `Unsupported` for other types or deep nesting."""
    pickler = Pickler()
    try:
        pickler.save(value)
    except RecursionError as error:
        raise Unsupported("the value is nested too deeply to be pickled") from error
    return bytes(pickler.out + b".")


class Pickler:
    """A pickle that is written, piece by piece, into `out`.

    Strings and globals are written once and then fetched from the memo. So are objects, which must live as long as the
    pickler, unless `by_identity` is false.
    """

    __slots__ = ("by_identity", "memo", "out")

    def __init__(self, *, by_identity: bool = True) -> None:
        self.out = bytearray(b"\x80\x02")
        self.by_identity = by_identity
        self.memo: dict[object, int] = {}  # strings and globals by value, other objects by id()

    def memoize_strings_of(self, value: Any) -> bytes:
        """Write a value and discard it, so that its strings are in the memo; return its opcodes from now on."""
        self.save(value)
        self.out += b"0"
        return self.opcodes_of(value)

    def opcodes_of(self, value: Any) -> bytes:
        """Return the opcodes that `value` would have now."""
        out, self.out = self.out, bytearray()
        self.save(value)
        piece, self.out = bytes(self.out), out
        return piece

    def save(self, value: Any) -> None:
        save = _SAVES.get(type(value))
        if save is None:
            raise Unsupported(f"a {type(value).__name__} cannot be pickled here")
        save(self, value)

    # constants

    def _save_none(self, _: None) -> None:
        self.out += b"N"

    def _save_boolean(self, value: bool) -> None:
        self.out += b"\x88" if value else b"\x89"

    def _save_integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K%c" % value
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + _i32.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise Unsupported(f"an integer of {len(data)} bytes cannot be pickled here")
            self.out += b"\x8a%c" % len(data) + data

    def _save_float(self, value: float) -> None:
        self.out += b"G" + _f64.pack(value)

    def _save_string(self, value: str) -> None:
        if not self._write_memo_get(value):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + _u32.pack(len(data)) + data
            self._write_memo_put(value)

    def _save_bytes(self, value: bytes) -> None:
        self._save_global(_BYTES)
        self._save_string(value.decode("latin-1"))
        self._save_string("latin1")
        self.out += b"\x86R"

    # containers

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        if value and self._write_memo_get(id(value)):
            return
        small = _SMALL_TUPLES.get(len(value))
        if small is None:
            self.out += b"("
        for member in value:
            self.save(member)
        self.out += small or b"t"
        if value:
            self._write_memo_put(id(value))

    def _save_list(self, value: list[Any]) -> None:
        if not self._write_memo_get(id(value)):
            self.out += b"]"
            self._write_memo_put(id(value))
            self._save_members(value)

    def _save_dict(self, value: dict[Any, Any]) -> None:
        if not self._write_memo_get(id(value)):
            self.out += b"}"
            self._write_memo_put(id(value))
            self._save_pairs(value.items())

    def _save_members(self, members: Iterable[Any]) -> None:
        self.out += b"("
        for member in members:
            self.save(member)
        self.out += b"e"

    def _save_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.out += b"("
        for key, value in pairs:
            self.save(key)
            self.save(value)
        self.out += b"u"

    # names and calls of code

    def _save_global(self, value: Global) -> None:
        if self._write_memo_get(value):
            return
        above, _, last = value.name.rpartition(".")
        if above:  # protocol 2 has no nested classes: a call of getattr finds one
            self._save_global(_GETATTR)
            self._save_global(Global(value.module, above))
            self._save_string(last)
            self.out += b"\x86R"
        else:
            self.out += f"c{value.module}\n{value.name}\n".encode()
        self._write_memo_put(value)

    def _save_call(self, value: Record) -> None:
        if self._write_memo_get(id(value)):
            return
        self.save(value.of)
        self.save(value.args)
        self.out += b"\x81" if value.is_new else b"R"
        self._write_memo_put(id(value))
        if value.members is not None:
            self._save_members(value.members)
        if value.items is not None:
            self._save_pairs(value.items)
        if value.state is not None:
            self.save(value.state)
            self.out += b"b"

    def _save_persistent_id(self, value: PersistentId) -> None:
        self.save(value.value)
        self.out += b"Q"

    # memo

    def _write_memo_get(self, key: object) -> bool:
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h%c" % index if index < 256 else b"j" + _u32.pack(index)
        return True

    def _write_memo_put(self, key: object) -> None:
        if type(key) is int and not self.by_identity:
            return
        index = self.memo[key] = len(self.memo)
        self.out += b"q%c" % index if index < 256 else b"r" + _u32.pack(index)


_P = Pickler
_SAVES: Final[dict[type, Callable[[Pickler, Any], None]]] = {
    type(None): _P._save_none, bool: _P._save_boolean, int: _P._save_integer, float: _P._save_float,
    TuplePlace: _P._save_integer,
    str: _P._save_string, NumberKey: _P._save_string, DTypeKey: _P._save_string, bytes: _P._save_bytes,
    tuple: _P._save_tuple, list: _P._save_list, dict: _P._save_dict, Dict: _P._save_dict,
    Global: _P._save_global, Record: _P._save_call, PersistentId: _P._save_persistent_id,
}  # fmt: skip
