"""Require a complete checkpoint."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import NotACheckpoint


def require_complete(path: Path) -> None:
    """Raise `NotACheckpoint` if a path is no complete checkpoint."""
    if not (path.is_dir() and Checkpoint.at(path).is_complete):
        hint = f"run `ckptkit verify {path}` to see its problems, or `ckptkit ls {path.parent}` to list the others"
        raise NotACheckpoint("no complete checkpoint", path=path, hint=hint)
