"""Gather the names in a checkpoint that identify its trainer. Small files are opened only on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported, translate_os_errors
from ckptkit.formats.archives.torch_save import read_state_file
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.io.file import names_in, read_small
from ckptkit.layout import KeyPath, Layout
from ckptkit.trainers.trainer import Evidence

_LIMIT = 1 << 24  # bytes: larger files are not small files of a trainer


def gather_evidence_from_names(root: Path) -> Evidence:
    """Return the evidence at `root`, a directory or file, without reading metadata."""
    files = frozenset(names_in(root)) if root.is_dir() else frozenset({root.name})

    def read_json(name: str) -> Mapping[str, Any]:
        path = root / name
        return read_json_object(path) if name in files or (".." in path.parts and path.is_file()) else {}

    def read_class(name: str) -> str:
        path = (root if name in files else root.parent) / name
        try:
            with translate_os_errors(path):
                is_small = path.is_file() and path.stat().st_size <= _LIMIT
            value = read_state_file(path.parent, path.name).value if is_small else None
        except (Corrupt, IOFailure, Unsafe, Unsupported):
            return ""
        return str(value.of) if isinstance(value, Record) else ""

    return Evidence(root, files, read_json=read_json, read_class=read_class)


def gather_trainer_evidence(path: Path, layouts: Iterable[Layout]) -> Evidence:
    """Return the evidence at `path`, a directory or file. The first layout is the model's."""
    model, *others = layouts
    below: dict[str, set[str]] = {}
    for layout in (model, *others):
        for name in layout.names:
            key = layout.key(name)
            below.setdefault(str(key[0]), set()).update(map(str, key[1:2]))
    return replace(
        gather_evidence_from_names(path),
        format=model.format,
        world_size=model.world_size,
        keys=frozenset(below),
        below={key: frozenset(names) for key, names in below.items()},
        read_source=lambda: read_source_record(path),
    )


def read_source_record(path: Path) -> Mapping[str, str] | None:
    """Return the manifest's record of the source checkpoint; None without a valid manifest or record."""
    try:
        manifest = read_manifest(path) if path.is_dir() else None
    except (Corrupt, IOFailure, Unsafe):
        return None
    return manifest.source if manifest else None


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a small file; {} if the file has no readable object."""
    try:
        value = parse_json(read_small(path, _LIMIT), path)
    except (Corrupt, IOFailure, Unsafe):
        return {}
    return value if isinstance(value, dict) else {}


def read_value_at_key(path: Path, key: KeyPath) -> object:
    """Return the value at a key path in a small JSON file; None if it is missing."""
    value: object = read_json_object(path) if path.is_file() else {}
    for step in key:
        value = value.get(step) if isinstance(value, dict) else None
    return value
