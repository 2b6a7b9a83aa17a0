"""Tell whether a directory has a delta, and of which kind, by one small file in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptkit.files.file import is_there, read_small
from ckptkit.formats.indices import read_index
from ckptkit.formats.json_text import parse_json

RECORD = "delta.json"  # of ckptkit's own format
INDEX, ENCODING = "model.safetensors.index.json", "delta_encoding"  # of a version of disk-delta
MANIFEST = "manifest.json"  # of SkyRL
LIMIT = 1 << 28  # bytes of such a file


def is_any_delta(path: Path) -> bool:
    """Return whether a directory has a delta of any format."""
    return is_delta(path) or is_any_byte_delta(path)


def is_any_byte_delta(path: Path) -> bool:
    """Return whether a directory has a delta of bytes."""
    return is_byte_delta(path) or is_manifest_delta(path)


def is_delta(path: Path) -> bool:
    """Return whether a directory has a delta of ckptkit's own format, as far as its `delta.json` shows."""
    return path.is_dir() and is_there(path / RECORD)


def is_byte_delta(path: Path) -> bool:
    """Return whether a version of disk-delta is a delta, and not a whole model."""
    return path.is_dir() and ENCODING in read_metadata(path)


def is_manifest_delta(path: Path) -> bool:
    """Return whether a directory has a manifest of SkyRL's deltas."""
    if not (path.is_dir() and is_there(path / MANIFEST)):
        return False
    value = parse_json(read_small(path / MANIFEST, LIMIT), path / MANIFEST)
    return isinstance(value, dict) and {"base_version", "tensors"} <= value.keys()


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what the index of a version says of it; {} without an index."""
    return read_index(path / INDEX)[1] if is_there(path / INDEX) else {}
