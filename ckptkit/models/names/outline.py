"""Replace the numbers in a tensor's name, so that it is the same in all layers."""

from __future__ import annotations

import re

# a number that is a whole step of a name, or follows `weight` or `bias`, as in modules with several experts; a pattern
# that begins with a digit is found four times as fast as one that begins with what is before it
_NUMBER = re.compile(r"[0-9](?:(?<![^.].)[0-9]{0,8}(?![^.])|(?:(?<=\.weight.)|(?<=\.bias.))[0-9]{0,8}(?![^._]))")


Numbers = tuple[int, ...]


def outline_of(name: str) -> str:
    """Return a name with `#` for each of its numbers (whole steps, or ends of `weight` and `bias`)."""
    return _NUMBER.sub("#", name)


def numbers_in(name: str) -> Numbers:
    """Return the numbers that `outline_of` replaces."""
    return tuple(map(int, _NUMBER.findall(name)))
