"""Derive a seed for each thing that is drawn at random, so that no state of a generator need ever be saved."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """Return a seed of 56 bits for these `parts`: the same on every machine, unrelated to that of any other parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")
