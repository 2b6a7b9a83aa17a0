"""Read the steps of a rule as people write them in TOML: a word, or a table of a word with what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.errors import Usage
from ckptkit.names.sizes import SYMBOLS
from ckptkit.names.steps import (
    Alternating,
    Chain,
    Each,
    Flat,
    Grouped,
    Joined,
    Reversed,
    Rotary,
    Same,
    Step,
    Transposed,
)

_EXTENTS = ("heads", "key_heads")
_MOST = 64  # axes, or tensors that one becomes


def step_in(value: object) -> Step:
    """Return the step that a value describes: its name, a table with its name as key, or a list of several in turn."""
    if isinstance(value, list):
        return Chain(tuple(map(step_in, value)))
    table = {value: None} if isinstance(value, str) else value
    if not isinstance(table, dict) or not table:
        raise Usage(f"`step` is {value!r}", hint=f"use one of {', '.join(_STEPS)}")
    name, argument = next(iter(table.items()))
    if name not in _STEPS:
        raise Usage(f"`step`: there is no `{name}`", hint=f"use one of {', '.join(_STEPS)}")
    more = {key: one for key, one in table.items() if key != name}
    make, keys = _STEPS[name]
    require_keys(more, keys, f"`step`: {name}")
    return make(argument, more)


def number_in(value: object, what: str, least: int = 0) -> int:
    """Return a number. Raises `Usage` for anything else."""
    if type(value) is not int or not least <= value <= _MOST:
        raise Usage(f"`step`: {what} is {value!r}", hint=f"a number from {least} to {_MOST}")
    return value


def joined(argument: object, more: Mapping[str, Any]) -> Step:
    """Return the step for tensors that follow each other."""
    count, axis = number_in(argument, "joined", 1), number_in(more.get("axis", 0), "axis")
    parts = more.get("parts", [])
    if not isinstance(parts, list) or (parts and len(parts) != count) or any(one not in _EXTENTS for one in parts):
        raise Usage(f"`step`: parts is {parts!r}", hint=f"{count} of {', '.join(_EXTENTS)}")
    return Joined(count, axis, tuple(parts))


def alternating(argument: object, more: Mapping[str, Any]) -> Step:
    return Alternating(number_in(argument, "alternating", 1), number_in(more.get("axis", 0), "axis"))


def transposed(argument: object, _more: Mapping[str, Any]) -> Step:
    """Return the step for axes that are exchanged."""
    axes = [0, 1] if argument is None else argument
    if not isinstance(axes, list) or len(axes) != 2:
        raise Usage(f"`step`: transposed is {argument!r}", hint="the numbers of two axes, like [0, 1]")
    one, other = (number_in(axis, "transposed") for axis in axes)
    return Transposed((one, other))


def symbolic(make: Callable[[str], Step], name: str) -> Callable[[object, Mapping[str, Any]], Step]:
    """Return the function for a step that a symbol for a number belongs to."""

    def of(argument: object, _more: Mapping[str, Any]) -> Step:
        if argument not in SYMBOLS:
            raise Usage(f"`step`: {name} is {argument!r}", hint=f"use one of {', '.join(SYMBOLS)}")
        return make(str(argument))

    return of


def plain(step: Step, name: str) -> Callable[[object, Mapping[str, Any]], Step]:
    """Return the function for a step that nothing belongs to."""

    def of(argument: object, _more: Mapping[str, Any]) -> Step:
        if argument not in (None, True):
            raise Usage(f"`step`: {name} is {argument!r}", hint=f'write "{name}"')
        return step

    return of


_STEPS: dict[str, tuple[Callable[[object, Mapping[str, Any]], Step], tuple[str, ...]]] = {
    "same": (plain(Same(), "same"), ()),
    "rotary": (symbolic(Rotary, "rotary"), ()),
    "grouped": (plain(Grouped(), "grouped"), ()),
    "joined": (joined, ("axis", "parts")),
    "alternating": (alternating, ("axis",)),
    "transposed": (transposed, ()),
    "flat": (symbolic(Flat, "flat"), ()),
    "each": (lambda argument, _: Each(tuple(map(step_in, argument if isinstance(argument, list) else [argument]))), ()),
    "reversed": (lambda argument, _: Reversed(step_in(argument)), ()),
}


def require_keys(found: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise `Usage` for a key that there is not."""
    strange = next((key for key in found if key not in known), None)
    if strange is not None:
        raise Usage(f"{what} has no key `{strange}`", hint=f"there are {', '.join(known)}")


def counts_of(step: Step, count: int) -> int | None:
    """Return how many tensors a step makes of so many, None if it takes another number."""
    made: int | None = count
    match step:
        case Chain(steps):
            for one in steps:
                made = None if made is None else counts_of(one, made)
        case Each(steps):
            made = count if len(steps) == count and all(counts_of(one, 1) == 1 for one in steps) else None
        case Reversed(inner):
            made = next((n for n in range(1, _MOST + 1) if counts_of(inner, n) == count), None)
        case Grouped():
            made = 3 if count == 1 else None
        case Joined(parts) | Alternating(parts):
            made = parts if count == 1 else None
    return made
