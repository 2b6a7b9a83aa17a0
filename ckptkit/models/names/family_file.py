"""Read the user's table of rules from a TOML file. Errors name the line and the key.

A step is a word, or a table of a word with its arguments.

name = "mine"
[[rule]]
own = "blocks.{layer}.attn.q.weight"
hub = "model.layers.{layer}.self_attn.q_proj.weight"
step = {rotary = "heads"}
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.errors import Usage, hint_on_choices, translate_os_errors
from ckptkit.io.file import is_existing_path, read_small
from ckptkit.layout.renames import numbers_in
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule, alternative_patterns
from ckptkit.models.names.sizes import SYMBOLS, Sizes
from ckptkit.models.names.steps import (
    Alternating,
    Chain,
    Concatenated,
    Each,
    FlatFront,
    Grouped,
    Reversed,
    Rotary,
    Same,
    SwappedAxes,
    TensorStep,
)
from ckptkit.words import count

_LIMIT = 1 << 20  # bytes
_HEADER = re.compile(r"[ \t]*\[\[[ \t]*rule[ \t]*\]\]")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TEXT = re.compile(r"(\{[a-z]+\}|\[[^\[\]{}]*(\{[a-z]+\})?[^\[\]{}]*\]|[^\[\]{}])+")
_KEYS = ("own", "hub", "step", "flat")
_EXTENTS = ("heads", "key_heads")
_MAX_COUNT = 64  # largest axis, and number of tensors that a step makes of one


def read_family_file(path: Path) -> Family:
    """Return the family that a file describes. Raises `Usage` for a file that is not a valid table."""
    if not is_existing_path(path):
        raise Usage("no such file: --map takes a table of names", path=path)
    with translate_os_errors(path):
        data = read_small(path, _LIMIT)
    try:
        text = data.decode()
        parsed = tomllib.loads(text)
    except ValueError as error:  # includes tomllib's errors, which name the line
        raise Usage(f"not valid TOML: {error}", path=path) from None
    try:
        return parse_family(parsed, path.stem, text)
    except Usage as error:
        raise error.blame(path=path) from None


def parse_family(parsed: Mapping[str, Any], name: str, text: str) -> Family:
    """Return the family that a parsed file describes. `name` is its default name."""
    refuse_unknown_keys(parsed, ("name", "drop", "rule"), "the file")
    name = parsed.get("name", name)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Usage(f"`name`: expected a plain name, found {name!r}", hint="use letters, digits, `-` and `_` in a name")
    entries = parsed.get("rule")
    if not isinstance(entries, list) or not entries:
        raise Usage("the table does not contain a `[[rule]]`")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    rules = []
    for i, entry in enumerate(entries):
        where = f"line {lines[i]}" if len(lines) == len(entries) else f"rule {i + 1}"
        try:
            rules.append(parse_rule_entry(entry))
        except Usage as error:
            raise Usage(f"{where}: {error.message}", hint=error.hint) from None
    dropped = parse_names(parsed, "drop") if "drop" in parsed else ()
    drops = tuple(re.escape(p.outline) for one in dropped for p in alternative_patterns(one))
    return Family(name=name, rules=lambda _: tuple(rules), drops=drops)


def parse_rule_entry(entry: object) -> Rule:
    if not isinstance(entry, dict):
        raise Usage("a rule must be a table", hint="begin the rule with [[rule]]")
    refuse_unknown_keys(entry, _KEYS, "a rule")
    own, hub = parse_names(entry, "own"), parse_names(entry, "hub")
    flat = entry.get("flat", "")
    if flat and flat not in SYMBOLS:
        raise Usage(f"`flat`: unknown symbol {flat!r}", hint=f"use one of {', '.join(SYMBOLS)}")
    step = parse_step(entry.get("step", "same"))
    check_placeholders("own", own)
    check_placeholders("hub", hub)
    if find_tensor_count(step, len(own)) != len(hub):
        message = f"`step` does not make {count(len(hub), 'tensor')} of {len(own)}"
        raise Usage(message, hint="joined splits one tensor into several, {reversed = {joined = 2}} joins two tensors")
    return Rule(own, hub, step, flat)


def parse_names(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names under a key, which may be a single string. Raises `Usage` for anything else."""
    value = table.get(key)
    texts = tuple(value) if isinstance(value, list) else (value,)
    for text in texts:
        if not isinstance(text, str) or not _TEXT.fullmatch(text):
            hint = "write a name like `layers.{layer}.wq.weight`: numbers in braces, optional parts in brackets"
            raise Usage(f"`{key}`: expected a name, found {value!r}", hint=hint)
        if numbers_in(text):
            hint = "write {layer} or a similar placeholder instead of the number"
            raise Usage(f"`{key}` has a number in {text!r}", hint=hint)
    return texts


def check_placeholders(key: str, texts: tuple[str, ...]) -> None:
    """Raise `Usage` unless all names of one side have the same placeholders, each once."""
    first, *others = (next(alternative_patterns(text)).captures for text in texts)
    other = next((captures for captures in others if set(captures) != set(first)), None)
    if other is not None or len(set(first)) != len(first):
        raise Usage(f"the names in `{key}` must have the same numbers, each once")


def with_fallback_family(table: Family, family: Family | None) -> Family:
    """Return the user's table, extended by a family's rules for names that the table does not have."""
    if family is None or type(family) is not Family:  # subclasses translate without rules
        return table

    def rules(sizes: Sizes) -> tuple[Rule, ...]:
        return (*table.rules(sizes), *family.rules(sizes))

    return replace(family, name=table.name, drops=(*table.drops, *family.drops), rules=rules)


def parse_step(value: object) -> TensorStep:
    """Return the step that a value describes: its name, a table with its name as key, or a list of steps in order."""
    if isinstance(value, list):
        return Chain(tuple(map(parse_step, value)))
    table = {value: None} if isinstance(value, str) else value
    if not isinstance(table, dict) or not table:
        raise Usage(f"`step`: expected the name of a step, found {value!r}", hint=f"use one of {', '.join(_STEPS)}")
    name, argument = next(iter(table.items()))
    if name not in _STEPS:
        raise Usage(f"`step`: unknown step `{name}`", hint=f"use one of {', '.join(_STEPS)}")
    more = {key: one for key, one in table.items() if key != name}
    refuse_unknown_keys(more, _MORE_KEYS.get(name, ()), f"`step`: {name}")
    if name in _PLAIN:
        if argument not in (None, True):
            raise Usage(f"`step`: {name}: expected no argument, found {argument!r}", hint=f'write "{name}"')
        return _PLAIN[name]
    if name in _BY_SIZE:
        if argument not in SYMBOLS:
            message = f"`step`: {name}: expected the symbol of a size, found {argument!r}"
            raise Usage(message, hint=f"use one of {', '.join(SYMBOLS)}")
        return _BY_SIZE[name](str(argument))
    return _WITH_ARGUMENT[name](argument, more)


def parse_count(value: object, key: str, least: int = 0) -> int:
    """Return an integer from `least` to 64. Raises `Usage` for anything else."""
    if type(value) is not int or not least <= value <= _MAX_COUNT:
        range_text = f"a number from {least} to {_MAX_COUNT}"
        raise Usage(f"`step`: {key}: expected {range_text}, found {value!r}", hint=f"use {range_text}")
    return value


def parse_concatenated(argument: object, more: Mapping[str, Any]) -> TensorStep:
    """Return the step for tensors that are concatenated along an axis."""
    count, axis = parse_count(argument, "joined", 1), parse_count(more.get("axis", 0), "axis")
    parts = more.get("parts", [])
    if not isinstance(parts, list) or (parts and len(parts) != count) or any(one not in _EXTENTS for one in parts):
        hint = f"use {count} of {', '.join(_EXTENTS)}"
        raise Usage(f"`step`: parts: expected {count} sizes, found {parts!r}", hint=hint)
    return Concatenated(count, axis, tuple(parts))


def parse_transposed(argument: object) -> TensorStep:
    """Return the step that swaps two axes."""
    axes = [0, 1] if argument is None else argument
    if not isinstance(axes, list) or len(axes) != 2:
        message = f"`step`: transposed: expected two axes, found {argument!r}"
        raise Usage(message, hint="use the numbers of two axes, like [0, 1]")
    one, other = (parse_count(axis, "transposed") for axis in axes)
    return SwappedAxes((one, other))


_PLAIN: dict[str, TensorStep] = {"same": Same(), "grouped": Grouped()}
_BY_SIZE: dict[str, Callable[[str], TensorStep]] = {"rotary": Rotary, "flat": FlatFront}
_WITH_ARGUMENT: dict[str, Callable[[object, Mapping[str, Any]], TensorStep]] = {
    "joined": parse_concatenated,
    "alternating": lambda count, more: Alternating(
        parse_count(count, "alternating", 1), parse_count(more.get("axis", 0), "axis")
    ),
    "transposed": lambda axes, _: parse_transposed(axes),
    "each": lambda steps, _: Each(tuple(map(parse_step, steps if isinstance(steps, list) else [steps]))),
    "reversed": lambda step, _: Reversed(parse_step(step)),
}
_MORE_KEYS = {"joined": ("axis", "parts"), "alternating": ("axis",)}
_STEPS = (*_PLAIN, *_BY_SIZE, *_WITH_ARGUMENT)


def refuse_unknown_keys(table: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise `Usage` for an unknown key."""
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        hint = hint_on_choices(known) if known else "remove the key"
        raise Usage(f"{what} does not have a key `{unknown}`", hint=hint)


def find_tensor_count(step: TensorStep, count: int) -> int | None:
    """Return how many tensors a step makes from `count` tensors; None if it does not accept that many."""
    result: int | None = count
    match step:
        case Chain(steps):
            for one in steps:
                result = None if result is None else find_tensor_count(one, result)
        case Each(steps):
            result = count if len(steps) == count and all(find_tensor_count(one, 1) == 1 for one in steps) else None
        case Reversed(inner):
            result = next((n for n in range(1, _MAX_COUNT + 1) if find_tensor_count(inner, n) == count), None)
        case Grouped():
            result = 3 if count == 1 else None
        case Concatenated(parts) | Alternating(parts):
            result = parts if count == 1 else None
    return result
