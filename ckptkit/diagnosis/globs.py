"""Write the `--exclude` globs that match some names and no others. Arithmetic on names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import translate
from glob import escape

from ckptkit.names.renames import fold


def globs_for(names: Collection[str], others: Collection[str], most: int) -> tuple[str, ...] | None:
    """Return globs that match all `names` and none of the `others`; None if it takes more than `most`.

    Those come first that match the most: all that lies in a layer, or the same in all layers.
    """
    found: list[str] = []
    left = dict.fromkeys(names)
    while left:
        if len(found) == most:
            return None
        matches = {glob: matched(glob, left) for glob in globs_of(next(iter(left))) if not matched(glob, others)}
        best = max(matches, key=lambda glob: len(matches[glob]))
        found.append(best)
        for name in matches[best]:
            del left[name]
    return tuple(found)


def globs_of(name: str) -> Iterator[str]:
    """Yield the name itself as a glob, with all numbers, and all that lies in the same modules, from the innermost."""
    yield escape(name)
    yield fold(escape(name))
    words = escape(name).split(".")
    yield from (".".join([*words[:count], "*"]) for count in range(len(words) - 1, 0, -1))


def matched(glob: str, names: Collection[str]) -> list[str]:
    pattern = re.compile(translate(glob))
    return [name for name in names if pattern.match(name)]
