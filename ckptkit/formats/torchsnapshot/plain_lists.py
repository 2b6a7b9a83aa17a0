"""Join the plain values of a list to one value, as DCP has it: only so torch's own loader takes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptkit.layout import KeyPath

_DEEPEST = 64  # steps of a key path that leads to a list


def join_lists(values: Mapping[KeyPath, Any], others: Iterable[KeyPath]) -> dict[KeyPath, Any]:
    """Return plain values by key path, lists of them as one; `others` are the ways to what is no plain value.

    A list stays apart if anything else is in it, however deep.
    """
    mixed = {above for key in others for above in lists_above(key)}
    by_length: dict[int, dict[KeyPath, Any]] = {}
    for key, value in values.items():
        by_length.setdefault(min(len(key), _DEEPEST + 1), {})[key] = value
    joined = by_length.pop(_DEEPEST + 1, {})
    for length in range(_DEEPEST, 0, -1):
        members: dict[KeyPath, dict[int, Any]] = {}
        for key, value in by_length.get(length, {}).items():
            last = key[-1]
            if isinstance(last, int) and length > 1 and key[:-1] not in mixed:
                members.setdefault(key[:-1], {})[last] = value
            else:
                joined[key] = value
                mixed.update(lists_above(key))
        for above, found in members.items():
            if set(found) == set(range(len(found))):
                by_length.setdefault(length - 1, {})[above] = [found[i] for i in range(len(found))]
            else:
                joined |= {(*above, i): value for i, value in found.items()}
                mixed.update(lists_above(above))
    return joined


def lists_above(key: KeyPath) -> Iterator[KeyPath]:
    return (key[:end] for end in range(1, min(len(key), _DEEPEST)) if isinstance(key[end], int))
