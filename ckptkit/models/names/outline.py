"""Remove the numbers from a tensor's name, so that it is the same in all layers."""

from __future__ import annotations

import re

# a step of a name that is a number, or one at the end of `weight` or `bias`, as experts in one module have it
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])|(?:(?<=\.weight)|(?<=\.bias))[0-9]{1,9}(?![^._])")

Numbers = tuple[int, ...]


def outline_of(name: str) -> tuple[str, Numbers]:
    """Return a name with `#` for every number that is a step of it, or ends `weight` or `bias`, and these numbers."""
    return _NUMBER.sub("#", name), tuple(map(int, _NUMBER.findall(name)))
