"""Read values of the expected types from a pickle, or raise an error that names the entry."""

from __future__ import annotations

from typing import Any, TypeVar

from ckptkit.errors import Corrupt
from ckptkit.formats.archives.flatten import name_of_type, pairs_of
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.pickles.tensor_calls import as_shape, is_tensor
from ckptkit.layout.box import Shape

Kind = TypeVar("Kind")

_MOST_AXES = 64  # of a tensor, as in torch


def as_dict(value: Any, what: str) -> dict[str | int, Any]:
    """Return the items of a dict with keys that are strings or integers. Raises `Corrupt` for anything else."""
    pairs = pairs_of(value)
    if pairs is None or not all(isinstance(key, (str, int)) for key, _ in pairs):
        raise Corrupt(f"`{what}`: expected a dict by name or number, found {name_of_type(value)}")
    return dict(pairs)


def dict_or_none(value: Any, what: str) -> dict[str | int, Any]:
    """Return the items of a dict; {} for None."""
    return {} if value is None else as_dict(value, what)


def as_kind(value: Any, kind: type[Kind], what: str) -> Kind:
    """Return a value of exactly this type. Raises `Corrupt` for another type, subclasses included."""
    if type(value) is not kind:
        raise Corrupt(f"`{what}`: expected `{kind.__name__}`, found {name_of_type(value)}")
    return value


def as_count(value: Any, what: str) -> int:
    """Return an integer that is 0 or more. Raises `Corrupt` for anything else."""
    if as_kind(value, int, what) < 0:
        raise Corrupt(f"`{what}`: expected 0 or more, found {value}")
    return int(value)


def shapes_in_dict(value: Any, what: str) -> dict[str, Shape]:
    """Return the shapes in a dict of `torch.Size`, by name and in order."""
    shapes: dict[str, Shape] = {}
    for name, shape in dict_or_none(value, what).items():
        try:
            shapes[as_kind(name, str, what)] = checked = as_shape(shape)
            if len(checked) > _MOST_AXES:
                raise ValueError("shape")
        except ValueError as error:
            raise Corrupt(f"`{what}`: expected a shape, found {name_of_type(shape)}", tensor=str(name)) from error
    return shapes


def without_classes(value: Any) -> Any:
    """Return a DeepSpeed object as plain values: its attributes, or the value of an enum member.

    The result can be loaded without DeepSpeed.
    """
    if not isinstance(value, Record) or is_tensor(value) or pairs_of(value) is not None:
        return value
    if value.state is None and len(value.args) == 1:
        return value.args[0]
    try:
        return value.attributes()
    except (TypeError, ValueError):
        return value
