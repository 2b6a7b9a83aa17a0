"""Digests: a number for all that a program wrote, to see whether it is what it always writes."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

_MANIFEST = "ckptkit.json"  # says where its source lay, and so differs from run to run


def digest(out: Path) -> str:
    """One number for all files at a path, by their names and contents, apart from manifests."""
    found = sha256()
    for path in sorted([out, *out.rglob("*")]):
        if path.is_file() and path.name != _MANIFEST:
            content = path.read_bytes()
            found.update(f"{path.relative_to(out)} {len(content)}\n".encode() + content)
    return found.hexdigest()
