"""Read pickles without running anything. Every global is a name, every call a record; nothing they name is imported.

Python's own unpickler does it, with a pickle that `opcodes` rewrites so that it can do no harm. Where it would
import something it is given a name, and a call of a name makes a record. Each opcode takes at least a byte of input and
allocates no more than it read, so memory and time are bounded by the size of the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.pickles.opcodes import SanitizedPickle, TableReader

TABLES_FROM = 1 << 20  # bytes of a pickle: the patterns of tables take milliseconds to compile
_BUFFER = 1 << 16  # bytes of the pickle that are rewritten ahead of the unpickler
_MOST_NAMES = 10_000  # in one pickle; each is a class, of a kilobyte
_LONGEST_NAME = 512  # characters of a name that is made of others


class Global(type):
    """A name that the pickle would have imported. It is a class, since the unpickler asks for one.

    A call of it gives a `Record`, and so does making an instance without a call, unless instances are to be a
    `FlatInstance`.
    """

    module: str
    name: str

    def __new__(cls, module: str, name: str, *, is_flat: bool = False) -> Global:
        """Return the class with this name."""
        made: dict[str, Any] = {"__slots__": (), "module": module, "name": name}
        if is_flat:
            return super().__new__(cls, "Global", (FlatInstance,), made)
        return super().__new__(cls, "Global", (), {**made, "__new__": _make})

    def __init__(cls, module: str, name: str, *, is_flat: bool = False) -> None:
        pass  # a class is made by `__new__`

    def __call__(cls, *args: Any) -> Record:
        """Return what the call would have made."""
        return Record(cls, args)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Refuse what a pickle may ask for."""
        raise AttributeError(name)

    def __eq__(cls, other: object) -> bool:
        return cls is other or (isinstance(other, Global) and (cls.module, cls.name) == (other.module, other.name))

    def __hash__(cls) -> int:
        return hash((cls.module, cls.name))

    def __repr__(cls) -> str:
        return f"{cls.module}.{cls.name}"


class Record:
    """A call that the pickle would have made: the callee, its arguments, and the state and contents given afterwards.

    `is_new` if a class would have made an instance without its `__init__`. `items` are pairs put into what would be a
    dict, `members` what was added to a list or a set.
    """

    __slots__ = ("args", "is_new", "items", "members", "of", "state")

    def __init__(self, of: object, args: tuple[Any, ...], *, is_new: bool = False) -> None:
        self.of = of
        self.args = args
        self.is_new = is_new
        self.state: Any = None
        self.items: list[Any] | None = None
        self.members: list[Any] | None = None

    def attributes(self) -> dict[str, Any]:
        """Return the state, if it was to be a dict. Raises `TypeError` if not."""
        if not isinstance(self.state, dict):
            raise TypeError("state")
        return self.state

    def __repr__(self) -> str:
        return f"<{self.of}>"

    # how the unpickler tells it what the object would have been given

    def __call__(self, *args: Any) -> Record:
        """Return what a call of what this would have been would have made."""
        return Record(self, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.items is None:
            self.items = []
        self.items.append((key, value))

    def extend(self, members: list[Any]) -> None:
        """Add members of what would be a list."""
        if self.members is None:
            self.members = []
        self.members.extend(members)

    def add(self, member: Any) -> None:
        """Add a member of what would be a set, and is a call with a list of them."""
        self.args[0].append(member)


class _Attribute(Global):
    """The name of `getattr`. A call of it with a name and a text is a name too: that of a class inside a class."""

    _name_it: Callable[[str, str], Any]

    def __new__(cls, module: str, name: str, name_it: Callable[[str, str], Any]) -> Global:
        """Return the class that asks `name_it` for the names that its calls make."""
        made = super().__new__(cls, module, name)
        type.__setattr__(made, "_name_it", staticmethod(name_it))
        return made

    def __init__(cls, module: str, name: str, name_it: Callable[[str, str], Any]) -> None:
        pass  # a class is made by `__new__`

    def __call__(cls, *args: Any) -> Any:
        """Return the name, or the record of another call."""
        match args:
            case (Global() as of, str(name)) if len(of.name) + len(name) < _LONGEST_NAME and "\n" not in name:
                return cls._name_it(of.module, f"{of.name}.{name}")
        return Record(cls, args)


def _make(of: Global, *args: Any) -> Record:
    return Record(of, args, is_new=True)


class FlatInstance(list[Any]):
    """An instance of a class, of which there may be millions: it is a list, made and filled without a call of Python's.

    Of a state that would be a dict it has the names and values in turn, and of any other the state itself. `columns`
    reads many at once.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]
    __setstate__ = list.append

    def attributes(self) -> dict[str, Any]:
        """Return the state by name, if it was to be a dict. Raises `TypeError` or `ValueError` if not."""
        if len(self) == 1 and isinstance(self[0], dict):
            return self[0]
        names = self[::2]
        "".join(names)  # a TypeError if anything else than text is among them, of which the hash could cost the world
        return dict(zip(names, self[1::2], strict=True))


def columns(instances: Sequence[FlatInstance], names: Sequence[str]) -> list[Sequence[Any]]:
    """Return the attributes of these names of many instances: a sequence of values for each name.

    The value is None where an instance lacks the attribute. Fast if all have the same first names, in this order.
    """
    states = [one if len(one) > 1 else list(chain.from_iterable(one.attributes().items())) for one in instances]
    try:
        rows = list(zip(*states, strict=True))
    except ValueError:  # some have more attributes than others
        rows = []
    found, values = rows[::2], rows[1::2]
    is_alike = bool(rows) and len(found) == len(values) <= len(names)
    if is_alike and all(row.count(name) == len(row) for row, name in zip(found, names, strict=False)):
        return [*values, *[[None] * len(instances)] * (len(names) - len(found))]
    attributes = [instance.attributes() for instance in instances]
    return [[some.get(name) for some in attributes] for name in names]


class NotTabular(Exception):
    """Instances are not what a table can hold: the pickle is to be read without tables."""


class InstanceTable:
    """Instances that followed one another, or pairs of them, a key and a value: of each the attributes by name."""

    __slots__ = ("_sides",)

    def __init__(self, sides: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        self._sides = sides

    def columns(self, names: Sequence[str], side: int = 0) -> list[Sequence[Any]]:
        """Return the attributes of these names, None for one that is not there; those of the values if `side` is 1."""
        attributes = self._sides[side]
        none = [None] * len(next(iter(attributes.values())))
        return [attributes.get(name, none) for name in names]

    @property
    def has_pairs(self) -> bool:
        return len(self._sides) > 1


def require_pairs(key: object, value: object) -> None:
    """Raise `NotTabular` unless what was put into a dict is a table of its keys and values, and None."""
    if not (isinstance(key, InstanceTable) and key.has_pairs and value is None):
        raise NotTabular


class Dict(dict[Any, Any]):
    """A dict that takes a key only if its hash costs no more than it seems to."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if InstanceTable in (type(key), type(value)):
            require_pairs(key, value)
        elif not isinstance(key, (str, FlatInstance)):
            check_key(key)
        super().__setitem__(key, value)


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
_SIZE = ("torch", "Size")
_GETATTR = (("builtins", "getattr"), ("__builtin__", "getattr"))
_tuple_itself = ().__add__  # gives back the tuple that it is called with, and nothing else
SCALARS: Final = (str, int, float, bytes, bool, type(None))
_MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def load(data: bytes, names: Names, *, at: int = 0, is_flat: bool = False) -> tuple[Any, int]:
    """Return the object pickled in `data` from byte `at`, and the offset past it.

    `names` holds each `(module, name)` that may occur; an unknown one is `Unsupported`, since a checkpoint
    has no need of it. Anything malformed is `Corrupt`. For millions of objects there is `is_flat`: instances of a class
    are `FlatInstance`, and what would be a `torch.Size` is a tuple. In a large pickle, an `InstanceTable` stands for
    alike instances that follow one another. Where these are keys and values of a dict, the table is a key with None.
    """
    if is_flat and len(data) - at >= TABLES_FROM:
        from ckptkit.formats.pickles.tables import Tables, has_long_runs  # only large checkpoints need them

        if has_long_runs(data, at):
            with suppress(NotTabular, *_MALFORMED):
                return _load(data, names, at, is_flat=True, tables=Tables(data, at))
    try:
        return _load(data, names, at, is_flat=is_flat)
    except _MALFORMED as error:
        raise Corrupt(f"the file is damaged or truncated: no valid pickle in bytes {at}:{len(data)}") from error


def _load(data: bytes, names: Names, at: int, *, is_flat: bool, tables: TableReader | None = None) -> tuple[Any, int]:
    harmless = SanitizedPickle(data, at, is_flat=is_flat, tables=tables)
    return _Unpickler(harmless, names, is_flat=is_flat, tables=tables).load(), harmless.end


class _Unpickler(pickle.Unpickler):
    """The unpickler, with all that it could import or refer to replaced."""

    def __init__(self, harmless: SanitizedPickle, names: Names, *, is_flat: bool, tables: TableReader | None) -> None:
        super().__init__(io.BufferedReader(harmless, _BUFFER), encoding="utf-8")
        self._tables = tables
        self._names = names
        self._is_flat = is_flat
        self._known: dict[tuple[str, str], Any] = {_SIZE: _tuple_itself} if is_flat and _SIZE in names else {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a name in the place of what it is the name of. Raises `Unsupported` for one that may not occur."""
        known = self._known.get((module, name))
        if known is None:
            if (module, name) not in self._names:
                raise Unsupported(
                    f"ckptkit does not expect `{module}.{name}` in the pickle of a checkpoint",
                    hint="report the name if you trust the producer: ckptkit never runs code from a checkpoint",
                )
            is_getattr = (module, name) in _GETATTR
            known = _Attribute(module, name, self.name_it) if is_getattr else self.name_it(module, name)
            self._known[module, name] = known
        return known

    def name_it(self, module: str, name: str) -> Any:
        """Return a name, the same for the same. Raises `Unsupported` when there are too many."""
        known = self._known.get((module, name))
        if known is None:
            if len(self._known) >= _MOST_NAMES:
                raise Unsupported(f"the pickle has more than {_MOST_NAMES} names")
            known = self._known[module, name] = Global(module, name, is_flat=self._is_flat)
        return known

    def persistent_load(self, pid: Any) -> Any:
        """Return a container in the place of the one that was rewritten to this id, or a reference.

        What torch once saved by reference with its source is a class, and is one here.
        """
        match pid:
            case None:
                return Dict()
            case ():
                return Record(_SET, ([],))
            case (("module", Global() as of, *_),):
                return of
            case (int(number), Global(), *_) if self._tables:  # what a pickle itself refers to is alone in a tuple
                sides = self._tables.name_it(number, pid[1:], _tuple_itself)
                if sides is None:
                    raise NotTabular
                return InstanceTable(sides)
            case _:
                return PersistentId(*pid)


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


def check_key(key: Any) -> None:
    """Raise `TypeError` for a dict key whose hash could cost more than it looks: nested tuples of shared tuples."""
    if isinstance(key, tuple):
        if not all(isinstance(part, SCALARS) for part in key):
            raise TypeError("key")
    elif not isinstance(key, (*SCALARS, Record, FlatInstance, Global)):
        raise TypeError("key")
