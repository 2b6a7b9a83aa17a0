"""Runs: a training directory and the checkpoints in it; which is complete, which is the latest. Reads no tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import IOFailure, NotACheckpoint, Unsupported, translate_os_errors
from ckptkit.files.file import names_in
from ckptkit.files.path import list_ahead
from ckptkit.formats import detect_format

TRAINING = "training"
_OF_TRAINING = (".pt", ".pth", ".bin")  # optimizers, schedulers and random states
# ckpt-5, checkpoint-5, step-5, global_step5, iter_0000005; NeMo's epoch_1_step_5, Composer's ep1-ba5, step_5_ckp, ...
_STEP = re.compile(
    r"(?:ep(?:och)?[-_]?[0-9]+[-_])?(?:ckpt|checkpoint|step|global_step|iter|ba)[-_]?([0-9]{1,18})(?:_ckp)?"
)
# ... Lightning's epoch=1-step=5.ckpt and NeMo's model--loss=2.5-step=5-consumed_samples=40.0
_STEP_AMONG_VALUES = re.compile(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:[-.].*)?")
_EPOCH = re.compile(r"epoch(?:[-_]?|=)([0-9]{1,18})(?:\.ckpt)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint of a run: its directory and its step."""

    path: Path
    step: int

    @property
    def is_complete(self) -> bool:
        """True if every part of it has been written to its end; False if it is deleted meanwhile."""
        try:
            return bool(parts := find_parts(self.path)) and all(map(is_complete, parts))
        except IOFailure:
            if self.path.exists():
                raise
            return False


@dataclass(frozen=True, slots=True)
class Run:
    """A training directory."""

    root: Path

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` lies or will lie."""
        return self.root / f"ckpt-{step}"

    def directories(self) -> list[Checkpoint]:
        """Whatever is named like a checkpoint, complete or not, oldest first."""
        if not self.root.is_dir():
            return []
        steps = ((path, step_of(path)) for path in folders(self.root))
        found = [Checkpoint(path, step) for path, step in steps if step is not None]
        list_ahead(checkpoint.path for checkpoint in found)
        return sorted(found, key=lambda ckpt: (ckpt.step, ckpt.path.name))

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first."""
        return [ckpt for ckpt in self.directories() if ckpt.is_complete]

    def latest(self) -> Checkpoint | None:
        """The complete checkpoint with the highest step, or None."""
        return max(self.checkpoints(), key=lambda ckpt: ckpt.step, default=None)


def children(path: Path) -> list[Path]:
    """What lies in a directory, by name."""
    with translate_os_errors(path):
        return sorted(path / name for name in names_in(path))


def folders(path: Path) -> list[Path]:
    """The directories in a directory, and links to some, by name."""
    with translate_os_errors(path):
        return [child for child in children(path) if child.is_dir()]


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name, or the epoch if that is all it says; None if it says neither."""
    match = _match_step(path.name) or _EPOCH.fullmatch(path.name)
    return int(match[1]) if match else None


def says_step(path: Path) -> bool:
    """True if a checkpoint directory's name says a step, and not an epoch, which cannot be compared with steps."""
    return _match_step(path.name) is not None


def _match_step(name: str) -> re.Match[str] | None:
    return _STEP.fullmatch(name) or _STEP_AMONG_VALUES.fullmatch(name)


def is_complete(path: Path) -> bool:
    """True if `path` is a checkpoint that was written to its end."""
    reader = detect_format(path)
    return reader is not None and reader.is_complete(path)


def is_weights_only(path: Path) -> bool:
    """True for a directory with a model and, by its files' names, nothing else of a training, such as an optimizer."""
    reader = detect_format(path) if path.is_dir() else None
    if reader is None or reader.name != "hf":
        return False
    return not any(child.is_dir() or child.suffix in _OF_TRAINING for child in children(path))


def require_resumable(path: Path) -> None:
    """Raise `NotACheckpoint` for a checkpoint of which nothing is left but the weights."""
    if is_weights_only(path):
        hint = "name a whole checkpoint, or begin a new run with `--model` and this directory"
        raise NotACheckpoint("only the weights are here: no training can go on from them", path=path, hint=hint)


def find_parts(path: Path) -> list[Path]:
    """`path` itself if it is a checkpoint, or else the directories in it that are: model and optimizer apart.

    A Hugging Face model that is still trained has the rest of its checkpoint in `training` beside it.
    """
    if detect_format(path) is not None:
        return [path, *(rest for rest in (path / TRAINING,) if rest.is_dir())]
    inside = [part for part in folders(path) if step_of(part) is None]
    return [part for part in inside if detect_format(part) is not None]


def find_whole(path: Path) -> Path:
    """The checkpoint that a user means by `path`, with all its parts: itself, or the latest complete one of a run.

    Raises `NotACheckpoint` if there is none.
    """
    if not path.is_dir() or detect_format(path) is not None:
        return path
    latest = Run(path).latest()
    if latest is not None:
        return latest.path
    if find_parts(path):
        return path
    raise no_checkpoint(path)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a user means by `path`: itself, the model's part of it, or the latest complete one of a run.

    Raises `NotACheckpoint` if there is none, `Unsupported` if it has several parts and none is plainly the model's.
    """
    if not path.is_dir() or detect_format(path) is not None:
        return path
    latest = Run(path).latest()
    if latest is not None:
        path = latest.path
    parts = [part for part in find_parts(path) if not part.name.startswith(("optim", TRAINING))]
    if len(parts) == 1:
        return parts[0]
    if parts:
        names = ", ".join(part.name for part in parts)
        raise Unsupported(f"several checkpoints are in this directory: {names}", path=path, hint="name one of them")
    raise no_checkpoint(path)


def no_checkpoint(path: Path) -> NotACheckpoint:
    """The error for a directory that is neither a checkpoint nor a run with one."""
    unfinished = [child.name for child in folders(path) if step_of(child) is not None]
    if unfinished:
        message = f"a run without a complete checkpoint; unfinished: {', '.join(unfinished)}"
        return NotACheckpoint(message, path=path)
    return NotACheckpoint(
        "no checkpoint in any known format, and no run with one",
        path=path,
        hint="looked for: DCP's metadata, safetensors, files of torch.save, and directories like ckpt-500",
    )
