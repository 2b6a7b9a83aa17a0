"""Describe the settings that a dataclass holds: kind, default and meaning of each field that users may set."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Help(NamedTuple):
    """The words that explain a setting, the placeholder that stands for its value, and the least that it may be."""

    text: str
    placeholder: str | None = None
    least: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that users may set: its type, without `None`; its default, `MISSING` if it must be given; its meaning."""

    kind: Any
    default: object
    text: str
    placeholder: str | None = None
    least: int | None = None


@cache
def settings_of(holder: Any) -> dict[str, Setting]:
    """Return the settings of a dataclass by name: the fields annotated with `Help`, or with mere words."""
    hints = get_type_hints(holder, include_extras=True)
    described = [field for field in fields(holder) if get_origin(hints[field.name]) is Annotated]
    return {field.name: setting(hints[field.name], field.default) for field in described}


def setting(hint: Any, default: object) -> Setting:
    """Return the setting that an annotation describes."""
    kind, words = get_args(hint)
    if get_origin(kind) in (Union, UnionType):
        kind = next(option for option in get_args(kind) if option is not type(None))
    about = Help(words) if isinstance(words, str) else words
    return Setting(kind, default, *about)
