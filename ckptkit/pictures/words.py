"""Put counts into words, and make any text safe to print."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """Return a number and a noun: `1 tensor`, `2 tensors`, `3 entries`."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def visible(text: str) -> str:
    """Return text in which nothing moves the cursor: what a checkpoint calls its tensors is not ours to trust."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
