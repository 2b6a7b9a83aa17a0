"""A run: a training directory and the checkpoints in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, latest_in, named_in
from ckptkit.io.path import is_remote


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The directory of a training, without the training: where its checkpoints lie."""

    root: Path

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of `step` lies or will lie."""
        return self.root / f"ckpt-{step}"

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        return [one for one in named_in(self.root) if one.is_complete]

    def up_to_latest(self) -> list[Checkpoint]:
        """Return the complete checkpoints up to the latest one, oldest first."""
        latest = self.latest()
        last = latest.own_step if latest else None
        return [one for one in self.checkpoints() if last is None or (one.own_step or 0) <= last]

    def latest(self) -> Checkpoint | None:
        """Return the latest complete checkpoint, or None; see `find_latest`."""
        return latest_in(self.root)


def local_folder(run: Path) -> Path:
    """Return where the files of a run lie that only this machine needs: in the run if it is local, or in the cache.

    The cache is `$XDG_CACHE_HOME/ckptkit`, by default `~/.cache/ckptkit`.
    """
    if not is_remote(run):
        return run
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ckptkit" / "runs" / f"{run.name}-{blake2b(str(run).encode(), digest_size=6).hexdigest()}"
