"""Put counts into words, make any text safe to print, and break it into lines."""

from __future__ import annotations

_PLURALS = {"index": "indices", "axis": "axes", "is": "are", "was": "were", "has": "have", "does": "do"}


def count(number: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun, and verb: `1 tensor is`, `2 tensors are`, `3 entries`."""
    if number == 1:
        words = (noun, verb)
    else:
        words = (_PLURALS.get(noun) or plural(noun), _PLURALS.get(verb) or verb.removesuffix("s"))
    return " ".join(filter(None, (f"{number:,}", *words)))


def plural(noun: str) -> str:
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def visible(text: str) -> str:
    """Return text in which nothing moves the cursor: what a checkpoint calls its tensors is not ours to trust."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fold(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` characters; each further line is indented by two more.

    It breaks after a space, or else after a dot or slash, or else after another sign. Only a word that is longer than
    a line breaks inside.
    """
    indent = " " * min(len(text) - len(text.lstrip(" ")) + 2, width // 2)
    lines = []
    while len(text) > width:
        end = find_break(text, width)
        lines.append(text[:end].rstrip(" "))
        text = indent + text[end:].lstrip(" ")
    return [*lines, text]


def find_break(text: str, width: int) -> int:
    """Return where the first line of a text ends, so that it is at most `width` characters and not nearly empty."""
    least = max(width // 3, len(text) - len(text.lstrip(" ")) + 1)
    for signs in (" ", "./", ",_-:="):
        # the space after a line does not count
        end = max(text.rfind(sign, least, width + (sign == " ")) for sign in signs) + 1
        if end:
            return end
    return width
