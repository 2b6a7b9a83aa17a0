"""Recognize a delta in a directory, and its kind, by one small file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ckptkit.files.file import is_there, names_in
from ckptkit.formats.change_marks import INDEX, index_has_changes, manifest_has_changes
from ckptkit.formats.indices import read_index

RECORD = "delta.json"  # of ckptkit's own format
_PAYLOAD = re.compile(r"delta-[0-9]+-of-[0-9]+\.safetensors")


def is_any_delta(path: Path) -> bool:
    """Return whether a directory has a delta of any format."""
    return is_delta(path) or is_any_byte_delta(path)


def is_any_byte_delta(path: Path) -> bool:
    """Return whether a directory has a delta of bytes."""
    return is_byte_delta(path) or is_manifest_delta(path)


def is_delta(path: Path) -> bool:
    """Return whether a directory has a delta of ckptkit's own format, as far as its `delta.json` shows."""
    return path.is_dir() and is_there(path / RECORD)


def is_unfinished(path: Path) -> bool:
    """Return whether a directory has files of a delta of ckptkit's own format, and no `delta.json`."""
    return not is_there(path / RECORD) and any(map(_PAYLOAD.fullmatch, names_in(path)))


def is_byte_delta(path: Path) -> bool:
    """Return whether a version of disk-delta is a delta, and not a whole model."""
    return path.is_dir() and index_has_changes(path)


def is_manifest_delta(path: Path) -> bool:
    """Return whether a directory has a manifest of SkyRL's deltas."""
    return path.is_dir() and manifest_has_changes(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what the index of a version says of it; {} without an index."""
    return read_index(path / INDEX)[1] if is_there(path / INDEX) else {}
