"""Open a delta of bytes, in any of its formats."""

from __future__ import annotations

from pathlib import Path

from ckptkit.deltas import disk_delta, manifest_delta
from ckptkit.deltas.byte_delta import ByteDelta
from ckptkit.deltas.find import is_byte_delta, is_manifest_delta
from ckptkit.errors import Mismatch


def open_byte_delta(path: Path) -> ByteDelta:
    """Open the delta of bytes in a directory. Raises `Mismatch` for anything else."""
    if is_byte_delta(path):
        return disk_delta.open_version(path)
    if is_manifest_delta(path):
        return manifest_delta.open_manifest_delta(path)
    hint = "apply deltas of one format at once; a whole version takes the place of the base"
    raise Mismatch("expected a byte delta, like the other deltas that you passed", path=path, hint=hint)
