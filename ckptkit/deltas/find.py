"""Recognize a delta in a directory, and its kind, by one small file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ckptkit.files.file import folders, is_there, names_in
from ckptkit.files.path import RemotePath
from ckptkit.formats import detect_format
from ckptkit.formats.change_marks import INDEX, index_has_changes, manifest_has_changes
from ckptkit.formats.indices import read_index

RECORD = "delta.json"  # of ckptkit's own format
_PAYLOAD = re.compile(r"delta-[0-9]+-of-[0-9]+\.safetensors")


def is_any_delta(path: Path) -> bool:
    """Return whether a directory has a delta of any format, finished or not."""
    return is_delta(path) or is_any_byte_delta(path) or is_unfinished(path)


def members_of(path: Path) -> list[Path]:
    """Return what lies in a local directory of deltas, whole models among them; for any other path, the path itself."""
    if isinstance(path, RemotePath) or not path.is_dir() or is_any_delta(path) or detect_format(path) is not None:
        return [path]
    found = [folder for folder in folders(path) if not folder.name.startswith(".")]
    return found if any(map(is_any_delta, found)) else [path]


def is_any_byte_delta(path: Path) -> bool:
    """Return whether a directory has a delta of bytes."""
    return is_byte_delta(path) or is_manifest_delta(path)


def is_delta(path: Path) -> bool:
    """Return whether a directory has a delta of ckptkit's own format, as far as its `delta.json` shows."""
    return path.is_dir() and is_there(path / RECORD)


def is_unfinished(path: Path) -> bool:
    """Return whether a directory has files of a delta of ckptkit's own format, and no `delta.json`."""
    return path.is_dir() and not is_there(path / RECORD) and any(map(_PAYLOAD.fullmatch, names_in(path)))


def is_byte_delta(path: Path) -> bool:
    """Return whether a version of disk-delta is a delta, and not a whole model."""
    return path.is_dir() and index_has_changes(path)


def is_manifest_delta(path: Path) -> bool:
    """Return whether a directory has a manifest of SkyRL's deltas."""
    return path.is_dir() and manifest_has_changes(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what the index of a version says of it; {} without an index."""
    return read_index(path / INDEX)[1] if is_there(path / INDEX) else {}
