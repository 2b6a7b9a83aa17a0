"""Check the arguments of public functions by their type hints, so that an error names the wrong one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ForwardRef, Literal, TypeVar, Union, Unpack, get_args, get_origin

from ckptkit.errors import Usage
from ckptkit.words import join_with_or

Function = TypeVar("Function", bound=Callable[..., Any])

_MAX_SHOWN = 60  # characters of a value that an error shows
_CLASSES = {int: Integral, float: Real}  # also accept numpy's numbers


def with_checked_arguments(function: Function) -> Function:
    """Return a wrapper of the function that raises `Usage` for an argument of the wrong type."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name, value in arguments_by_name(function, args, options):
            kind = type_hints_of(function).get(name, Any)
            if not is_of_type(value, kind):
                expected, shown = join_with_or(dict.fromkeys(describe_type(kind))), repr(value)
                shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
                found = shown if value is None else f"{shown} ({type(value).__name__})"
                raise Usage(f"`{name}`: expected {expected}, found {found}")
        return function(*args, **options)

    return call  # type: ignore[return-value]


def arguments_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call by name; nothing for a call that Python itself refuses."""
    called = signature(function)
    try:
        bound = called.bind(*args, **options)
    except TypeError:
        return
    for name, value in bound.arguments.items():
        if called.parameters[name].kind is Parameter.VAR_POSITIONAL:
            yield from ((name, item) for item in value)
        elif called.parameters[name].kind is Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


@cache
def type_hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameter types of a function by name, including those of `**options: Unpack[...]`."""
    own = resolve_annotations(function)
    unpacked = [get_args(hint)[0] for hint in own.values() if get_origin(hint) is Unpack]
    return own | {name: hint for options in unpacked for name, hint in resolve_annotations(options).items()}


def resolve_annotations(holder: Any) -> dict[str, Any]:
    """Return the annotations of a function or class as types; `Any` for names imported only under TYPE_CHECKING."""
    return {
        name: resolve_annotation(hint, vars(sys.modules[holder.__module__]))
        for name, hint in holder.__annotations__.items()
    }


def resolve_annotation(hint: Any, namespace: dict[str, Any]) -> Any:
    text = hint.__forward_arg__ if isinstance(hint, ForwardRef) else hint
    try:
        return eval(text, namespace) if isinstance(text, str) else text
    except NameError:  # e.g. torch, imported only under TYPE_CHECKING
        return Any


def is_of_type(value: object, kind: Any) -> bool:
    """Return whether a value has a type; True for a type that does not restrict values."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(is_of_type(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if kind in _CLASSES:
        return isinstance(value, _CLASSES[kind]) and not isinstance(value, bool)
    if is_iterable_type(origin):
        is_list = isinstance(value, list | tuple)
        is_iterable = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return is_iterable and (not is_list or all(is_of_type(each, inner[0]) for each in value))  # type: ignore[attr-defined]
    try:
        return isinstance(value, NoneType if kind is None else origin or as_path_like_type(kind))
    except TypeError:  # Any, a type variable, or a protocol that is not runtime-checkable
        return True


def is_iterable_type(origin: Any) -> bool:
    """Return whether a generic type is an iterable of values, such as `Sequence[str]`."""
    return isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping)


def as_path_like_type(kind: Any) -> Any:
    """Return `os.PathLike` for `Path`, because functions accept any path-like; any other type unchanged."""
    return os.PathLike if isinstance(kind, type) and issubclass(kind, os.PathLike) else kind


def describe_type(kind: Any) -> Iterator[str]:
    """Yield a description of a type, or of each member of a union: `str`, `Path`, `a list of str`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for each in inner:
            yield from describe_type(each)
    elif origin is Literal:
        yield from map(repr, inner)
    elif is_iterable_type(origin):
        yield f"a list of {' or '.join(dict.fromkeys(describe_type(inner[0])))}"
    elif kind in (None, NoneType):
        yield "None"
    elif as_path_like_type(origin or kind) is os.PathLike:
        yield "Path"
    else:
        yield {"Callable": "a function", "Mapping": "dict"}.get((origin or kind).__name__, (origin or kind).__name__)
