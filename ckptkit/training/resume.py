"""Find the checkpoints that a run can resume from, and load the newest undamaged checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.checkpoints.checkpoint import Checkpoint, step_checkpoints_in_run
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import (
    CkptError,
    Corrupt,
    Mismatch,
    NotACheckpoint,
    Occupied,
    Unsafe,
    Unsupported,
    translate_os_errors,
)
from ckptkit.io.disk import move_directory_into_place
from ckptkit.io.path import drop_cached_listing, is_remote
from ckptkit.models.companions import CONFIG
from ckptkit.trainers import find_step_of_path
from ckptkit.training.config import AUTO, SETTINGS, TrainConfig

if TYPE_CHECKING:  # the command line calls `find_resume_candidates` before it imports torch
    from ckptkit.storage.ranks import Ranks
    from ckptkit.training.saving.run import Run
    from ckptkit.training.trainer import Trainer

_DAMAGED = "damaged-"  # prefix of the new name of a checkpoint that could not be loaded
_NAMED = 4  # checkpoints listed in an error: a long run has hundreds


def find_resume_candidates(config: TrainConfig) -> list[Path]:
    """Return the checkpoints to resume from, newest first; [] for a new run.

    Raises `Occupied` if the run has checkpoints that this training would overwrite or repeat, and `NotACheckpoint` if
    the requested checkpoint is missing or incomplete.
    """
    complete = RunFolder(drop_cached_listing(config.run)).checkpoints()[::-1]
    if config.resume is None and complete:
        hint = "continue with --resume auto, or pass another run"
        raise Occupied("the run has checkpoints already", path=config.run, hint=hint)
    if config.resume is None or (config.resume == AUTO and not complete):
        require_finished_checkpoints(config.run)
        return []
    if config.resume == AUTO:
        complete[0].require_resumable()
        return [checkpoint.path for checkpoint in complete if not checkpoint.is_weights_only]
    chosen = Checkpoint.open(config.resume)
    chosen.require_resumable()
    if not chosen.is_complete:
        raise NotACheckpoint("the checkpoint is not complete: cannot resume", path=chosen.path)
    if not complete:
        require_finished_checkpoints(config.run)
    chosen_path = chosen.path.resolve()
    # the run would repeat later steps, and would mix metrics and checkpoints of two trainings
    later = [*takewhile(lambda checkpoint: checkpoint.path.resolve() != chosen_path, complete)][::-1]
    if later:
        names = ", ".join(checkpoint.name for checkpoint in later[:_NAMED]) + (", ..." if len(later) > _NAMED else "")
        if len(later) < len(complete):
            message = f"the run has checkpoints after {chosen.name}: {names}"
        else:
            message = f"the run already has checkpoints, and {chosen.path} is not one of them: {names}"
        settings = chosen.path.parent / SETTINGS
        option = f" --config {shlex.quote(str(settings))}" if settings.is_file() else ""
        command = f"ckptkit train NEW --resume {shlex.quote(str(chosen.path))}{option}"
        raise Occupied(message, path=config.run, hint=f"train into a new run: `{command}`")
    return [chosen.path]


def require_finished_checkpoints(run: Path) -> None:
    """Raise `Occupied` if a local run has unfinished checkpoints, because a save of the same step would fail.

    In a store a save replaces an unfinished checkpoint of the same step. Also raises it for the directory of a model,
    whose config.json the run would replace.
    """
    if (run / CONFIG).exists() and not (run / SETTINGS).exists():
        message = f"expected a new directory or a run, found {CONFIG} without {SETTINGS}"
        raise Occupied(message, path=run, hint="pass another directory for the run")
    names = [checkpoint.name for checkpoint in ([] if is_remote(run) else step_checkpoints_in_run(run))]
    if names:
        message = f"the run has only unfinished checkpoints: {', '.join(names)}"
        raise Occupied(message, path=run, hint="move them away, or pass another run")


def first_readable_checkpoint(candidates: Sequence[Path]) -> Path:
    """Return the first checkpoint with undamaged metadata. If all are damaged, raises the error of the first."""
    errors: list[Exception] = []
    for path in candidates:
        try:
            _ = Checkpoint.open(path).layout
        except (Corrupt, Unsafe, Unsupported) as error:
            errors.append(error)
        else:
            return path
    raise errors[0]


def load_newest_undamaged(
    trainer: Trainer, run: Run, candidates: Sequence[Path], ranks: Ranks, warn: Callable[[str], None]
) -> None:
    """Load the first undamaged checkpoint of `candidates`, on all ranks.

    The run will save the steps of the damaged checkpoints before it again. Local ones are therefore renamed; a store
    cannot rename, so the run is allowed to overwrite them. Raises the error of the first candidate if all are damaged.
    """
    damaged: dict[Path, CkptError] = {}
    for path in candidates:
        try:
            trainer.load(run, path)
        except (Corrupt, Unsafe, Unsupported) as error:
            damaged[path] = error
            continue
        if find_step_of_path(path) not in (None, trainer.progress.step):
            message = f"expected step {find_step_of_path(path)} (in its name), found {trainer.progress.step}"
            raise Mismatch(message, path=path, hint=f"rename it to {run.checkpoint(trainer.progress.step).name}")
        for other, reason in damaged.items():
            if is_remote(other):
                run.replace(other)
                outcome = f"{other.name} is replaced when its step is saved again"
            else:
                ranks.run_on_first_rank(partial(rename_damaged, other))
                outcome = f"{other.name} is now {_DAMAGED}{other.name}"
            warn(f"warning: {other} cannot be loaded: {reason.message}; resuming from {path}, {outcome}")
        return
    raise next(iter(damaged.values()))


def rename_damaged(path: Path) -> None:
    with translate_os_errors(path):
        move_directory_into_place(path, path.with_name(_DAMAGED + path.name), overwrite=False)
