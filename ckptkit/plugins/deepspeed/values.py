"""Read values of the expected types from a pickle, or raise an error that names the entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckptkit.errors import Corrupt
from ckptkit.formats.archives.flatten import describe_pickled_type, find_dict_items
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.pickles.tensor_calls import as_shape, is_pickled_tensor
from ckptkit.layout.box import Shape

Kind = TypeVar("Kind")

_MOST_AXES = 64  # of a tensor, as in torch


def require_dict(value: Any, name: str) -> dict[str | int, Any]:
    """Return the items of a dict with keys that are strings or integers. Raises `Corrupt` for anything else."""
    pairs = find_dict_items(value)
    if pairs is None or not all(isinstance(key, (str, int)) for key, _ in pairs):
        raise Corrupt(f"`{name}`: expected a dict by name or number, found {describe_pickled_type(value)}")
    return dict(pairs)


def dict_or_empty(value: Any, what: str) -> dict[str | int, Any]:
    return {} if value is None else require_dict(value, what)


def require_type(value: Any, expected: type[Kind], name: str) -> Kind:
    """Return a value of exactly this type. Raises `Corrupt` for another type, subclasses included."""
    if type(value) is not expected:
        raise Corrupt(f"`{name}`: expected `{expected.__name__}`, found {describe_pickled_type(value)}")
    return value


def require_count(value: Any, name: str) -> int:
    """Return an integer that is 0 or more. Raises `Corrupt` for anything else."""
    if require_type(value, int, name) < 0:
        raise Corrupt(f"`{name}`: expected 0 or more, found {value}")
    return int(value)


def require_each(
    value: Any, require: Callable[[Any, str], Kind], name: str, *, groups: int | None = None
) -> list[Kind]:
    """Return the members of a list, each as `require` returns it. Raises `Corrupt` unless it has as many `groups`."""
    members = require_type(value, list, name)
    if groups is not None and len(members) != groups:
        raise Corrupt(f"`{name}`: expected {groups} groups, found {len(members)}")
    return [require(member, name) for member in members]


def require_counts(value: Any, name: str) -> tuple[int, ...]:
    return tuple(require_each(value, require_count, name))


def require_name(value: Any, name: str) -> str:
    return require_type(value, str, name)


def shapes_in_dict(value: Any, what: str) -> dict[str, Shape]:
    """Return the shapes in a dict of `torch.Size`, by name and in order."""
    shapes: dict[str, Shape] = {}
    for name, shape in dict_or_empty(value, what).items():
        try:
            shapes[require_type(name, str, what)] = checked = as_shape(shape)
            if len(checked) > _MOST_AXES:
                raise ValueError("shape")
        except ValueError as error:
            raise Corrupt(
                f"`{what}`: expected a shape, found {describe_pickled_type(shape)}", tensor=str(name)
            ) from error
    return shapes


def as_plain_values(value: Any) -> Any:
    """Return a DeepSpeed object as plain values: its attributes, or the value of an enum member.

    The result can be loaded without DeepSpeed.
    """
    if not isinstance(value, Record) or is_pickled_tensor(value) or find_dict_items(value) is not None:
        return value
    if value.state is None and len(value.args) == 1:
        return value.args[0]
    try:
        return value.attributes()
    except (TypeError, ValueError):
        return value
