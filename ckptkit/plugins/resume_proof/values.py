"""Walk through an inertly read value, and copy it with some of its numbers changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptkit.formats.pickles.inert_pickle import SCALARS, Dict, Global, PersistentId, Record
from ckptkit.formats.pickles.tensor_calls import is_tensor

Path = tuple[str | int, ...]
_BYTES = Global("_codecs", "encode")  # pickles of protocol 2, as torch.save's, have bytes as a call of it
Visit = Callable[[Path, Any], Any]  # (where a scalar is, its value) -> its new value


@dataclass(slots=True)
class Copying:
    """A copy of a value in the making; objects that are shared in the value are shared in the copy."""

    visit: Visit
    copies: dict[int, Any] = field(default_factory=dict)

    def copy_value(self, value: Any, path: Path) -> Any:
        """Return the copy of what is at a path. Tensors stay as they are."""
        if isinstance(value, Record) and value.of == _BYTES:
            value = value.args[0].encode(value.args[1])
        if isinstance(value, SCALARS):
            return self.visit(path, value)
        if isinstance(value, PersistentId | type) or is_tensor(value):
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = self.copy_container(value, path)
        return self.copies[id(value)]

    def copy_container(self, value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return Dict({key: self.copy_value(child, (*path, as_key_component(key))) for key, child in value.items()})
        if isinstance(value, list | tuple):
            return type(value)([self.copy_value(child, (*path, i)) for i, child in enumerate(value)])
        if not isinstance(value, Record):
            return value
        made = Record(value.of, self.copy_value(value.args, path), is_new=value.is_new)
        made.state = self.copy_value(value.state, path)
        if value.items is not None:
            made.items = [(key, self.copy_value(child, (*path, as_key_component(key)))) for key, child in value.items]
        if value.members is not None:
            made.members = self.copy_value(value.members, path)
        return made


def as_key_component(key: object) -> str | int:
    return key if isinstance(key, str | int) else str(key)


def copy_with(value: Any, visit: Visit) -> Any:
    """Return a copy of a value whose scalars are what `visit` returns for them."""
    return Copying(visit).copy_value(value, ())
