"""Derive the seed of each random draw from its position, so that checkpoints need no random-number generator state."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 56-bit seed: a hash of `parts`, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")
