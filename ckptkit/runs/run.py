"""A run on disk: a training directory and the checkpoints in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, latest_in, named_in


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

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint with the highest step, or None."""
        return latest_in(self.root)
