"""Read pickles without running their code: a global becomes a name, a call becomes a record, and nothing is imported.

Python's own unpickler reads a pickle that `opcodes` has rewritten into a harmless one. It never allocates more than the
pickle's size warrants, so memory and time are bounded by the size of the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from ckptkit.errors import RESTORE, Corrupt, Unsupported
from ckptkit.formats.pickles.opcodes import SanitizedPickle, TableReader

TABLES_FROM = 1 << 20  # bytes: in smaller pickles, compiling the patterns of tables costs more than they save
_BUFFER = 1 << 16  # bytes of the pickle that are rewritten ahead of the unpickler
_MOST_NAMES = 10_000  # in one pickle; each is a class and takes a kilobyte
_LONGEST_NAME = 512  # characters of a nested name such as Outer.Inner


class Global(type):
    """A name that the pickle would have imported. It is a class, because the unpickler requires one.

    A call of it returns a `Record`. An instance without a call is a `Record` too, or a `FlatInstance` if requested.
    """

    module: str
    name: str

    def __new__(cls, module: str, name: str, *, is_flat: bool = False) -> Global:
        attributes: dict[str, Any] = {"__slots__": (), "module": module, "name": name}
        if is_flat:
            return super().__new__(cls, "Global", (FlatInstance,), attributes)
        return super().__new__(cls, "Global", (), {**attributes, "__new__": _new_record})

    def __init__(cls, module: str, name: str, *, is_flat: bool = False) -> None:
        pass  # `__new__` does everything

    def __call__(cls, *args: Any) -> Record:
        return Record(cls, args)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Refuse: a pickle may request this."""
        raise AttributeError(name)

    def __eq__(cls, other: object) -> bool:
        return cls is other or (isinstance(other, Global) and (cls.module, cls.name) == (other.module, other.name))

    def __hash__(cls) -> int:
        return hash((cls.module, cls.name))

    def __repr__(cls) -> str:
        return f"{cls.module}.{cls.name}"


class Record:
    """A call that the pickle would have made: the callee, its arguments, and the state and contents set afterwards.

    `is_new` says that the instance would have been created without its `__init__`. `items` are pairs for a dict,
    `members` are elements for a list or a set.
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
        """Return the state if it is a dict. Raises `TypeError` if not."""
        if not isinstance(self.state, dict):
            raise TypeError("state")
        return self.state

    def __repr__(self) -> str:
        return f"<{self.of}>"

    # the unpickler calls the following methods to set the state and contents

    def __call__(self, *args: Any) -> Record:
        """Return the record of a call of the object that this record stands for."""
        return Record(self, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.items is None:
            self.items = []
        self.items.append((key, value))

    def extend(self, members: list[Any]) -> None:
        if self.members is None:
            self.members = []
        self.members.extend(members)

    def add(self, member: Any) -> None:
        """Add an element to a set, which is a call with a list of its elements."""
        self.args[0].append(member)


class _Attribute(Global):
    """The name of `getattr`. A call of it with a name and a string returns the name of a nested class."""

    _name_it: Callable[[str, str], Any]

    def __new__(cls, module: str, name: str, name_it: Callable[[str, str], Any]) -> Global:
        """Return the class that calls `name_it` for each nested class."""
        attribute = super().__new__(cls, module, name)
        type.__setattr__(attribute, "_name_it", staticmethod(name_it))
        return attribute

    def __init__(cls, module: str, name: str, name_it: Callable[[str, str], Any]) -> None:
        pass  # `__new__` does everything

    def __call__(cls, *args: Any) -> Any:
        """Return the name of a nested class, or the record of any other call."""
        match args:
            case (Global() as of, str(name)) if len(of.name) + len(name) < _LONGEST_NAME and "\n" not in name:
                return cls._name_it(of.module, f"{of.name}.{name}")
        return Record(cls, args)


def _new_record(of: Global, *args: Any) -> Record:
    return Record(of, args, is_new=True)


class FlatInstance(list[Any]):
    """An instance of a class with possibly millions of instances: a list, created and filled without calls in Python.

    It has the names and values of a state dict in turn, or any other state as its only element. `attribute_columns`
    reads many instances at once.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]
    __setstate__ = list.append

    def attributes(self) -> dict[str, Any]:
        """Return the state by name if it is a dict. Raises `TypeError` or `ValueError` if not."""
        if len(self) == 1 and isinstance(self[0], dict):
            return self[0]
        names = self[::2]
        "".join(names)  # a TypeError unless all are strings: the hash of other values may take forever
        return dict(zip(names, self[1::2], strict=True))


def attribute_columns(instances: Sequence[FlatInstance], names: Sequence[str]) -> list[Sequence[Any]]:
    """Return the attributes of many instances with these names: a sequence of values for each name.

    The value is None where an instance lacks the attribute. Fast if all have the same first names, in this order.
    """
    states = [one if len(one) > 1 else list(chain.from_iterable(one.attributes().items())) for one in instances]
    try:
        rows = list(zip(*states, strict=True))
    except ValueError:  # some have more attributes than others
        rows = []
    name_rows, values = rows[::2], rows[1::2]
    is_alike = bool(rows) and len(name_rows) == len(values) <= len(names)
    if is_alike and name_rows == [(name,) * len(states) for name in names[: len(name_rows)]]:
        return [*values, *[[None] * len(instances)] * (len(names) - len(name_rows))]
    attributes = [instance.attributes() for instance in instances]
    return [[by_name.get(name) for by_name in attributes] for name in names]


class NotTabular(Exception):
    """Raised if instances do not fit a table; the pickle is then read without tables."""


class InstanceTable:
    """Consecutive instances, or pairs of a key and a value instance: their attributes by name, as columns."""

    __slots__ = ("_sides", "has_pairs")

    def __init__(self, sides: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        self._sides = sides
        self.has_pairs = len(sides) > 1

    def columns(self, names: Sequence[str], key_or_value: int = 0) -> list[Sequence[Any]]:
        """Return the attributes with these names, None for a missing one.

        `key_or_value` is 0 for keys, 1 for values.
        """
        attributes = self._sides[key_or_value]
        none = [None] * len(next(iter(attributes.values())))
        return [attributes.get(name, none) for name in names]


class Dict(dict[Any, Any]):
    """A dict that refuses keys whose hash may be expensive."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is InstanceTable or type(value) is InstanceTable:  # `in` would compare each `Global`
            # a table of keys and values has the value None
            if not (isinstance(key, InstanceTable) and key.has_pairs and value is None):
                raise NotTabular
        elif type(key) is not str and not isinstance(key, FlatInstance):
            require_cheap_hash(key)
        dict.__setitem__(self, key, value)


@dataclass(slots=True)
class PersistentId:
    """A reference to an object outside the pickle, which torch uses for storages. The reference may be replaced."""

    value: Any


class _AnyName:
    def __contains__(self, name: object) -> bool:
        return True


Names = Container[tuple[str, str]]
# for the pickle of a user's own state: names are harmless, because they are never imported
ANY_NAME: Final = _AnyName()
_SET = Global("builtins", "set")
_SIZE = ("torch", "Size")
_GETATTR = (("builtins", "getattr"), ("__builtin__", "getattr"))
_tuple_itself = ().__add__  # returns the tuple argument unchanged, and fails for any other argument
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


def load(data: bytes, allowed_names: Names, *, at: int = 0, as_flat_instances: bool = False) -> tuple[Any, int]:
    """Return the object pickled in `data` from byte `at`, and the offset after it.

    `allowed_names` has each `(module, name)` that may occur. Raises `Unsupported` for another name, since a checkpoint
    does not need it, and `Corrupt` for a malformed pickle. `as_flat_instances` is for millions of objects: instances of
    a class are `FlatInstance`, and a `torch.Size` is a tuple. In a large pickle an `InstanceTable` replaces consecutive
    instances of one class. If these are keys and values of a dict, the table is a key with the value None.
    """
    if as_flat_instances and len(data) - at >= TABLES_FROM:
        from ckptkit.formats.pickles.tables import Tables, has_many_instances  # only large checkpoints need them

        if has_many_instances(data, at):
            # if the tables fail, read again without them, which also decides whether the pickle is damaged
            with suppress(NotTabular, *_MALFORMED):
                return _load(data, allowed_names, at, as_flat_instances=True, tables=Tables(data, at))
    try:
        return _load(data, allowed_names, at, as_flat_instances=as_flat_instances)
    except _MALFORMED as error:
        message = f"expected a pickle at byte {at}, found {len(data) - at} bytes that are damaged or truncated"
        raise Corrupt(message, hint=RESTORE) from error


def _load(
    data: bytes, allowed_names: Names, at: int, *, as_flat_instances: bool, tables: TableReader | None = None
) -> tuple[Any, int]:
    sanitized = SanitizedPickle(data, at, is_flat=as_flat_instances, tables=tables)
    return _Unpickler(sanitized, allowed_names, is_flat=as_flat_instances, tables=tables).load(), sanitized.end


class _Unpickler(pickle.Unpickler):
    """The unpickler, with everything that it could import or refer to replaced."""

    def __init__(self, sanitized: SanitizedPickle, names: Names, *, is_flat: bool, tables: TableReader | None) -> None:
        super().__init__(io.BufferedReader(sanitized, _BUFFER), encoding="utf-8")
        self._tables = tables
        self._names = names
        self._is_flat = is_flat
        self._known: dict[tuple[str, str], Any] = {_SIZE: _tuple_itself} if is_flat and _SIZE in names else {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a `Global` for a name. Raises `Unsupported` for a name that may not occur."""
        global_ = self._known.get((module, name))
        if global_ is None:
            if (module, name) not in self._names:
                hint = "report the name if you trust the producer: ckptkit never runs code from a checkpoint"
                raise Unsupported(f"ckptkit does not expect `{module}.{name}` in the pickle of a checkpoint", hint=hint)
            is_getattr = (module, name) in _GETATTR
            global_ = _Attribute(module, name, self.make_global) if is_getattr else self.make_global(module, name)
            self._known[module, name] = global_
        return global_

    def make_global(self, module: str, name: str) -> Any:
        """Return the `Global` of a name, always the same one. Raises `Unsupported` if there are too many names."""
        global_ = self._known.get((module, name))
        if global_ is None:
            if len(self._known) >= _MOST_NAMES:
                raise Unsupported(f"the pickle has more than {_MOST_NAMES} names")
            global_ = self._known[module, name] = Global(module, name, is_flat=self._is_flat)
        return global_

    def persistent_load(self, pid: Any) -> Any:
        """Return the container that was rewritten to this id, or a reference.

        Old versions of torch saved a module's class by reference together with its source code; the class is returned.
        """
        match pid:
            case None:
                return Dict()
            case ():
                return Record(_SET, ([],))
            case (("module", Global() as of, *_),):
                return of
            case (int(number), Global(), *_) if self._tables:  # references of the pickle itself are 1-tuples
                sides = self._tables.table_columns(number, pid[1:], _tuple_itself)
                if sides is None:
                    raise NotTabular
                return InstanceTable(sides)
            case _:
                return PersistentId(*pid)


def members_of_value(value: Any) -> Sequence[Any]:
    """Return the direct members of a loaded value of any kind."""
    if isinstance(value, Record):
        return [value.of, value.args, value.members, value.items, value.state]
    if isinstance(value, PersistentId):
        return [value.value]
    if isinstance(value, dict):
        return list(chain.from_iterable(value.items()))
    return value if isinstance(value, (list, tuple)) else ()


def walk_members(value: Any, members_of: Callable[[Any], Sequence[Any]] = members_of_value) -> Iterator[Any]:
    """Yield a loaded value and its nested members (those that `members_of` returns), each once, in their order."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        member = waiting.pop()
        if id(member) not in seen:
            seen.add(id(member))
            yield member
            waiting.extend(reversed(members_of(member)))


def require_cheap_hash(key: Any) -> None:
    """Raise `TypeError` for a dict key whose hash may take forever: nested tuples of shared tuples."""
    if isinstance(key, tuple):
        if not all(isinstance(member, (*SCALARS, Global)) for member in key):
            raise TypeError("key")
    elif not isinstance(key, (*SCALARS, Record, FlatInstance, Global)):
        raise TypeError("key")
