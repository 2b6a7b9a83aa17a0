"""Distinguish the safetensors of a delta from the safetensors of a model, by the JSON file beside them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.files.file import is_there, read_small
from ckptkit.formats.indices import read_index
from ckptkit.formats.json_text import parse_json

INDEX, ENCODING = "model.safetensors.index.json", "delta_encoding"  # of a version of disk-delta
MANIFEST = "manifest.json"  # of SkyRL
LIMIT = 1 << 28  # bytes of such a file


def index_has_changes(folder: Path) -> bool:
    """Return whether the index in a directory says that its files are a version of disk-delta."""
    return is_there(folder / INDEX) and ENCODING in read_index(folder / INDEX)[1]


def manifest_has_changes(folder: Path) -> bool:
    """Return whether a directory has a manifest of SkyRL's deltas."""
    if not is_there(folder / MANIFEST):
        return False
    value = parse_json(read_small(folder / MANIFEST, LIMIT), folder / MANIFEST)
    return isinstance(value, dict) and {"base_version", "tensors"} <= value.keys()
