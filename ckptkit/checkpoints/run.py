"""A run: a training directory and the checkpoints in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, find_latest_checkpoint, step_checkpoints_in_run
from ckptkit.io.path import is_remote


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The directory of a training and its checkpoints, without the training process."""

    root: Path

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, whether or not it exists."""
        return self.root / f"ckpt-{step}"

    def checkpoints(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint in step_checkpoints_in_run(self.root) if checkpoint.is_complete]

    def latest(self) -> Checkpoint | None:
        """Return the latest complete checkpoint, or None; see `find_latest`."""
        return find_latest_checkpoint(self.root)


def local_directory_of_run(run: Path) -> Path:
    """Return the directory for files of a run that only this machine needs: the run itself, or a cache if it is remote.

    The cache is `$XDG_CACHE_HOME/ckptkit`, by default `~/.cache/ckptkit`.
    """
    if not is_remote(run):
        return run
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ckptkit" / "runs" / f"{run.name}-{blake2b(str(run).encode(), digest_size=6).hexdigest()}"
