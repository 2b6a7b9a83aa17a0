"""Describe the settings in a dataclass: type, default and help text of each field that users may set."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Help(NamedTuple):
    """The help text of a setting, the placeholder for its value, and its minimum."""

    text: str
    placeholder: str | None = None
    least: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that users may set: its type, without `None`; its default, `MISSING` if it is required; its help text."""

    kind: Any
    default: object
    text: str
    placeholder: str | None = None
    least: int | None = None


def option_name(name: str) -> str:
    """Return the command-line option of a setting: `--save-every` for `save_every`."""
    return f"--{name.replace('_', '-')}"


@cache
def settings_of(holder: Any) -> dict[str, Setting]:
    """Return the settings of a dataclass by name: the fields annotated with `Help` or with a string."""
    hints = get_type_hints(holder, include_extras=True)
    settings = {}
    for field in fields(holder):
        if get_origin(hints[field.name]) is Annotated:
            value_type, words = get_args(hints[field.name])
            if get_origin(value_type) in (Union, UnionType):
                value_type = next(option for option in get_args(value_type) if option is not type(None))
            about = Help(words) if isinstance(words, str) else words
            settings[field.name] = Setting(value_type, field.default, *about)
    return settings
