"""Recognize a delta in a directory by one small file."""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.io.file import is_there, names_in

RECORD = "delta.json"
_PAYLOAD = re.compile(r"delta-[0-9]+-of-[0-9]+\.safetensors")


def is_delta(path: Path) -> bool:
    """Return whether a directory contains a complete delta, as far as its `delta.json` shows."""
    return path.is_dir() and is_there(path / RECORD)


def is_unfinished(path: Path) -> bool:
    """Return whether a directory contains files of a delta, but no `delta.json`."""
    return path.is_dir() and not is_there(path / RECORD) and any(map(_PAYLOAD.fullmatch, names_in(path)))
