"""Put counts into words, make any text safe to print, and break it into lines."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """Return a number and a noun: `1 tensor`, `2 tensors`, `3 entries`."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


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
