"""Recognize a delta in a directory by one small file."""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.files.file import folders, is_there, names_in
from ckptkit.files.path import RemotePath
from ckptkit.formats import detect_format

RECORD = "delta.json"
_PAYLOAD = re.compile(r"delta-[0-9]+-of-[0-9]+\.safetensors")


def is_delta(path: Path) -> bool:
    """Return whether a directory contains a complete delta, as far as its `delta.json` shows."""
    return path.is_dir() and is_there(path / RECORD)


def is_unfinished(path: Path) -> bool:
    """Return whether a directory contains files of a delta, but no `delta.json`."""
    return path.is_dir() and not is_there(path / RECORD) and any(map(_PAYLOAD.fullmatch, names_in(path)))


def is_any_delta(path: Path) -> bool:
    """Return whether a directory contains a delta, finished or not."""
    return is_delta(path) or is_unfinished(path)


def members_of(path: Path) -> list[Path]:
    """Return the contents of a local directory of deltas, full models included; for any other path, the path."""
    if isinstance(path, RemotePath) or not path.is_dir() or is_any_delta(path) or detect_format(path) is not None:
        return [path]
    found = [folder for folder in folders(path) if not folder.name.startswith(".")]
    return found if any(map(is_any_delta, found)) else [path]
