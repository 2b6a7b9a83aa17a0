"""Read pickles without running anything. Every global is a name, every call a record; nothing they name is imported.

The machine knows the opcodes that torch's pickles use and no others
(https://github.com/python/cpython/blob/3.13/Lib/pickletools.py describes them). Each consumes at least a byte of
input and allocates no more than it read, so memory and time are bounded by the size of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from ckptkit.errors import Corrupt, Unsupported


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle would have imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """A call that the pickle would have made: the callee, its arguments, and the state and contents given afterwards.

    `is_new` if a class would have made an instance without its `__init__`. `items` are pairs put into what would be a
    dict, `members` what was added to a list.
    """

    __slots__ = ("args", "is_new", "items", "members", "of", "state")

    def __init__(self, of: object, args: tuple[Any, ...], *, is_new: bool = False) -> None:
        self.of = of
        self.args = args
        self.is_new = is_new
        self.state: Any = None
        self.items: list[Any] | None = None
        self.members: list[Any] | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute `name` of the object that this would have been."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.of}>"


@dataclass(slots=True)
class PersistentId:
    """A reference to something outside the pickle; torch uses it for storages. May be made to refer to another."""

    value: Any


class _AnyName:
    def __contains__(self, name: object) -> bool:
        return True


Names = Container[tuple[str, str]]
ANY_NAME: Final = _AnyName()  # for the pickle of a user's own state: a name does no harm, since none is ever imported
_SET = Global("builtins", "set")
SCALARS: Final = (str, int, float, bytes, bool, type(None))
_u16, _u32, _u64, _i32, _f64 = Struct("<H"), Struct("<I"), Struct("<Q"), Struct("<i"), Struct(">d")


def load(data: bytes, names: Names, *, at: int = 0) -> tuple[Any, int]:
    """Return the object pickled in `data` from byte `at`, and the offset past it.

    `names` holds each `(module, name)` that may occur; an unknown one is `Unsupported`, since a checkpoint
    has no need of it. Anything malformed is `Corrupt`.
    """
    machine = _Machine(data, names, at)
    try:
        return machine.run(), machine.at
    except (
        StructError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise Corrupt(f"the pickle breaks off or makes no sense at byte {machine.at} of {len(data)}") from error


def parts_of(value: Any) -> Sequence[Any]:
    """Return everything directly in a loaded value, of any kind."""
    if isinstance(value, Record):
        return [value.of, value.args, value.members, value.items, value.state]
    if isinstance(value, PersistentId):
        return [value.value]
    if isinstance(value, dict):
        return list(chain.from_iterable(value.items()))
    return value if isinstance(value, (list, tuple)) else ()


def walk(value: Any, parts: Callable[[Any], Sequence[Any]] = parts_of) -> Iterator[Any]:
    """Return a loaded value and all that is in it, or as much as `parts` gives, each once and in the pickle's order."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting.extend(reversed(parts(part)))


class _Machine:
    __slots__ = ("at", "data", "memo", "names", "seen", "stack", "stacks")

    def __init__(self, data: bytes, names: Names, at: int) -> None:
        self.data = data
        self.names = names
        self.at = at
        self.stack: list[Any] = []
        self.stacks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.seen: dict[tuple[str, str], Global] = {}

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            operation = table[opcode]
            if operation is None:
                raise Unsupported(f"pickle opcode 0x{opcode:02x} at byte {self.at - 1} is not one that torch writes")
            operation(self)

    def take(self, length: int) -> bytes:
        end = self.at + length
        if length < 0 or end > len(self.data):
            raise IndexError(length)
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def number(self, layout: Struct) -> Any:
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        piece = self.take(end - self.at)
        self.at += 1
        return piece.decode("utf-8")

    def pop_marked(self) -> list[Any]:
        items = self.stack
        self.stack = self.stacks.pop()
        return items

    def find(self, module: Any, name: Any) -> Global:
        key = (module, name)
        known = self.seen.get(key)
        if known is None:
            if key not in self.names:
                raise Unsupported(
                    f"the pickle names `{module}.{name}`, which no checkpoint of this kind needs",
                    hint="ckptkit runs no code from a checkpoint; if you trust its producer, please report the name",
                )
            known = self.seen[key] = Global(module, name)
        return known

    # constants

    def proto(self) -> None:
        if self.byte() > 5:
            raise ValueError("protocol")

    def frame(self) -> None:
        length = self.number(_u64)
        if length > len(self.data) - self.at:
            raise IndexError(length)

    def short_unicode(self) -> None:
        start = self.at + 1
        end = start + self.data[self.at]
        if end > len(self.data):
            raise IndexError(end)
        self.at = end
        self.stack.append(self.data[start:end].decode("utf-8", "surrogatepass"))

    def unicode(self) -> None:
        self.stack.append(self.take(self.number(_u32)).decode("utf-8", "surrogatepass"))

    def unicode8(self) -> None:
        self.stack.append(self.take(self.number(_u64)).decode("utf-8", "surrogatepass"))

    def short_string(self) -> None:
        self.stack.append(self.take(self.byte()).decode("utf-8"))  # what Python 2 wrote of its `str`

    def string(self) -> None:
        self.stack.append(self.take(self.number(_i32)).decode("utf-8"))

    def short_bytes(self) -> None:
        self.stack.append(self.take(self.byte()))

    def bytes4(self) -> None:
        self.stack.append(self.take(self.number(_u32)))

    def bytes8(self) -> None:
        self.stack.append(self.take(self.number(_u64)))

    def int1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def int2(self) -> None:
        self.stack.append(self.number(_u16))

    def int4(self) -> None:
        self.stack.append(self.number(_i32))

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.byte()), "little", signed=True))

    def float8(self) -> None:
        self.stack.append(self.number(_f64))

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    # containers

    def mark(self) -> None:
        self.stacks.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        self.stack.pop()

    def drop_marked(self) -> None:
        self.pop_marked()

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple1(self) -> None:
        self.stack[-1] = (self.stack[-1],)

    def tuple2(self) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def tuple_marked(self) -> None:
        items = self.pop_marked()
        self.stack.append(tuple(items))

    def empty_list(self) -> None:
        self.stack.append([])

    def append(self) -> None:
        item = self.stack.pop()
        self.extend(self.stack[-1], [item])

    def appends(self) -> None:
        items = self.pop_marked()
        self.extend(self.stack[-1], items)

    def extend(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, Record):
            target.extend(items)
        elif target.members is None:
            target.members = items
        else:
            target.members.extend(items)

    def empty_dict(self) -> None:
        self.stack.append({})

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update(self.stack[-1], [key, value])

    def set_items(self) -> None:
        items = self.pop_marked()
        self.update(self.stack[-1], items)

    def update(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Record):
            pairs = list(zip(items[::2], items[1::2], strict=True))
            if target.items is None:
                target.items = []
            target.items.extend(pairs)
            return
        for key in items[::2]:
            if type(key) is not str:
                check_key(key)
        target.update(zip(items[::2], items[1::2], strict=True))

    def empty_set(self) -> None:
        self.stack.append(Record(_SET, ([],)))  # a set needs hashes of what the pickle made

    def add_items(self) -> None:
        items = self.pop_marked()
        self.stack[-1].args[0].extend(items)

    # memo

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def put1(self) -> None:
        self.put(self.byte())

    def put4(self) -> None:
        self.put(self.number(_u32))

    def put(self, index: int) -> None:
        if index > len(self.memo) + 1:  # picklers count from 0, or from 1: Python 2's
            raise ValueError("memo")
        self.memo[len(self.memo) :] = [None] * (index + 1 - len(self.memo))
        self.memo[index] = self.stack[-1]

    def get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get4(self) -> None:
        self.stack.append(self.memo[self.number(_u32)])

    # what would be imported and called

    def global_line(self) -> None:
        module = self.line()
        self.stack.append(self.find(module, self.line()))

    def global_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("global")
        self.stack.append(self.find(module, name))

    def call(self, *, is_new: bool = False) -> None:
        args, of = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple:
            raise TypeError("arguments")
        self.stack.append(Record(of, args, is_new=is_new))

    def make(self) -> None:
        self.call(is_new=True)

    def make_with_keywords(self) -> None:
        if self.stack.pop() != {}:
            raise TypeError("keywords")
        self.make()

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state

    def persistent(self) -> None:
        self.stack[-1] = PersistentId(self.stack[-1])


def check_key(key: Any) -> None:
    """Raise `TypeError` for a dict key whose hash could cost more than it looks: nested tuples of shared tuples."""
    if isinstance(key, tuple):
        if not all(isinstance(part, SCALARS) for part in key):
            raise TypeError("key")
    elif not isinstance(key, (*SCALARS, Record, Global)):
        raise TypeError("key")


_M = _Machine
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _M.proto, 0x95: _M.frame,
    0x8C: _M.short_unicode, 0x58: _M.unicode, 0x8D: _M.unicode8,
    0x55: _M.short_string, 0x54: _M.string, 0x43: _M.short_bytes, 0x42: _M.bytes4, 0x8E: _M.bytes8,
    0x4B: _M.int1, 0x4D: _M.int2, 0x4A: _M.int4, 0x8A: _M.long1, 0x47: _M.float8,
    0x4E: _M.none, 0x88: _M.true, 0x89: _M.false,
    0x28: _M.mark, 0x30: _M.pop, 0x31: _M.drop_marked,
    0x29: _M.empty_tuple, 0x85: _M.tuple1, 0x86: _M.tuple2, 0x87: _M.tuple3, 0x74: _M.tuple_marked,
    0x5D: _M.empty_list, 0x61: _M.append, 0x65: _M.appends,
    0x7D: _M.empty_dict, 0x73: _M.set_item, 0x75: _M.set_items,
    0x8F: _M.empty_set, 0x90: _M.add_items,
    0x94: _M.memoize, 0x71: _M.put1, 0x72: _M.put4, 0x68: _M.get1, 0x6A: _M.get4,
    0x63: _M.global_line, 0x93: _M.global_stack,
    0x52: _M.call, 0x81: _M.make, 0x92: _M.make_with_keywords, 0x62: _M.build,
    0x51: _M.persistent,
}  # fmt: skip
_TABLE: Final = [_OPERATIONS.get(opcode) for opcode in range(256)]
