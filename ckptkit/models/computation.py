"""Compare two config.json for what decides how a model computes, and what no shape tells: class, heads, rope."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_DECISIVE = re.compile(r"model_type|architectures|(.*_)?n?_?heads?|.*head_dim|.*rotary.*|rope_(?!theta).*")
_ROPE = ("rope_scaling", "rope_parameters")


class ConfigDifference(NamedTuple):
    """A key of config.json, with points between the keys of sections, and its two values."""

    key: str
    here: Any
    there: Any


def find_differences(
    config: Mapping[str, Any], other: Mapping[str, Any], section: str = ""
) -> Iterator[ConfigDifference]:
    """Yield what two models compute otherwise by their config.json. A key that only one has, or that is null, is open.

    The rope may be in `rope_theta` and `rope_scaling`, or in `rope_parameters`, as transformers writes it since 5.0.
    """
    rope, other_rope = rope_of(config), rope_of(other)
    for key in sorted(rope.keys() & other_rope.keys()):
        if rope[key] != other_rope[key]:
            yield ConfigDifference(f"{section}{key}", rope[key], other_rope[key])
    for key in sorted(config.keys() & other.keys() - {*_ROPE}):
        here, there = plain(key, config[key]), plain(key, other[key])
        if here is None or there is None or here == there:
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from find_differences(here, there, f"{section}{key}.")
        elif _DECISIVE.fullmatch(key):
            yield ConfigDifference(f"{section}{key}", here, there)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json, or a section of one, says of rotary positions, in the keys of `rope_parameters`."""
    found: dict[str, Any] = {}
    for key in _ROPE:
        found |= config[key] if isinstance(config.get(key), Mapping) else {}
    kind = found.pop("type", None)  # of files before transformers 4.43; it rewrites `mrope` itself
    found.setdefault("rope_type", kind if kind not in (None, "mrope") else "default")
    if config.get("rope_theta") is not None:
        found["rope_theta"] = config["rope_theta"]
    return {key: value for key, value in found.items() if value is not None}


def plain(key: str, value: Any) -> Any:
    """Return a value of config.json; a class without what FSDP1 puts before its name."""
    if key == "architectures" and isinstance(value, list):
        return [str(name).removeprefix("FSDP") for name in value]
    return value
