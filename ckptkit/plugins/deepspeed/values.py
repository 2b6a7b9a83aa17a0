"""Take values of the expected types out of a pickle, or raise an error that names the file."""

from __future__ import annotations

from typing import Any, TypeVar

from ckptkit.errors import Corrupt
from ckptkit.formats.archives.flatten import describe, pairs_of
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.pickles.tensor_calls import as_shape, is_tensor
from ckptkit.layout.box import Shape

Kind = TypeVar("Kind")

_MOST_AXES = 64  # of a tensor, as in torch


def as_dict(value: Any, what: str) -> dict[str | int, Any]:
    """Return the members of what would be a dict, by text or number."""
    pairs = pairs_of(value)
    if pairs is None or not all(isinstance(key, (str, int)) for key, _ in pairs):
        raise Corrupt(f"`{what}`: expected a dict by name or number, found {describe(value)}")
    return dict(pairs)


def dict_or_none(value: Any, what: str) -> dict[str | int, Any]:
    """Return the members of what would be a dict; none where nothing was saved."""
    return {} if value is None else as_dict(value, what)


def as_kind(value: Any, kind: type[Kind], what: str) -> Kind:
    """Return a value of this very kind."""
    if type(value) is not kind:
        raise Corrupt(f"`{what}`: expected `{kind.__name__}`, found {describe(value)}")
    return value


def as_count(value: Any, what: str) -> int:
    """Return a number that is 0 or more."""
    if as_kind(value, int, what) < 0:
        raise Corrupt(f"`{what}`: expected 0 or more, found {value}")
    return int(value)


def shapes_in(value: Any, what: str) -> dict[str, Shape]:
    """Return the shapes by name, in their order, in what would be a dict of `torch.Size`."""
    found: dict[str, Shape] = {}
    for name, shape in dict_or_none(value, what).items():
        try:
            found[as_kind(name, str, what)] = checked = as_shape(shape)
            if len(checked) > _MOST_AXES:
                raise ValueError("shape")
        except ValueError as error:
            raise Corrupt(f"`{what}`: expected a shape, found {describe(shape)}", tensor=str(name)) from error
    return found


def without_classes(value: Any) -> Any:
    """Return what is in an object of DeepSpeed's, as plain values: its attributes, or the value of an enumeration.

    So whoever loads them needs none of its classes.
    """
    if not isinstance(value, Record) or is_tensor(value) or pairs_of(value) is not None:
        return value
    if value.state is None and len(value.args) == 1:
        return value.args[0]
    try:
        return value.attributes()
    except (TypeError, ValueError):
        return value
