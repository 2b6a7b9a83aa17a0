"""Open a delta of bytes, in whatever format it is."""

from __future__ import annotations

from pathlib import Path

from ckptkit.deltas import disk_delta, manifest_delta
from ckptkit.deltas.byte_delta import ByteDelta
from ckptkit.deltas.record import is_delta
from ckptkit.errors import Mismatch


def is_any_byte_delta(path: Path) -> bool:
    """Return whether a delta of bytes lies in a directory."""
    return disk_delta.is_byte_delta(path) or manifest_delta.is_manifest_delta(path)


def is_any_delta(path: Path) -> bool:
    """Return whether a delta of any format lies in a directory."""
    return is_delta(path) or is_any_byte_delta(path)


def open_byte_delta(path: Path) -> ByteDelta:
    """Open the delta of bytes in a directory. Raises `Mismatch` for anything else."""
    if disk_delta.is_byte_delta(path):
        return disk_delta.open_version(path)
    if manifest_delta.is_manifest_delta(path):
        return manifest_delta.open_manifest_delta(path)
    hint = "apply deltas of one format at once; a whole version takes the place of the base"
    raise Mismatch("expected a delta of bytes, as those before or after it are", path=path, hint=hint)
