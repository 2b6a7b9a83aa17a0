"""Name the hidden files and directories beside a destination while it is made."""

from __future__ import annotations

import re
from pathlib import Path

HIDDEN = re.compile(r"\.(.+)\.ckptkit\.(?:tmp|old|lock)", re.DOTALL)


def staging_path(dst: Path) -> Path:
    """Return the hidden sibling in which `dst` is made; one name, so that a later run finds what a dead one left."""
    return dst.parent / f".{dst.name}.ckptkit.tmp"


def aside_path(dst: Path) -> Path:
    """Return the hidden sibling that the old `dst` is for a moment, where directories cannot be swapped in one step."""
    return dst.parent / f".{dst.name}.ckptkit.old"


def lock_path(dst: Path) -> Path:
    """Return the hidden sibling that the maker of `dst` holds a lock on."""
    return dst.parent / f".{dst.name}.ckptkit.lock"
