"""Find the checkpoints that a run can resume from, and load the newest one that is undamaged."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.checkpoints.checkpoint import Checkpoint, named_in
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import CkptError, Corrupt, NotACheckpoint, Occupied, Unsafe, Unsupported, translate_os_errors
from ckptkit.io.disk import move_into_place
from ckptkit.io.path import is_remote, refresh, to_path
from ckptkit.training.config import AUTO, SETTINGS, TrainConfig

if TYPE_CHECKING:  # the command line asks `find_resume` before it imports torch
    from ckptkit.storage.ranks import Ranks
    from ckptkit.training.saving.run import Run
    from ckptkit.training.trainer import Trainer

_DAMAGED = "damaged-"  # before the name of a checkpoint that a run could not resume from
_NAMED = 4  # checkpoints that an error names: a long run has hundreds


def find_resume(config: TrainConfig) -> list[Path]:
    """Return the checkpoints to resume from, the first that can be loaded; [] if there is none.

    Raises `Occupied` if the run must not be resumed, and `Corrupt` if no checkpoint is readable.
    """
    complete = RunFolder(refresh(config.run)).checkpoints()[::-1]
    if config.resume is None and complete:
        hint = "continue with `--resume auto`, or name another run"
        raise Occupied("the run has checkpoints already", path=config.run, hint=hint)
    if config.resume is None or (config.resume == AUTO and not complete):
        require_no_unfinished(config.run)
        return []
    if config.resume == AUTO:
        complete[0].require_resumable()
        return [one.path for one in complete if not one.is_weights_only]
    if not to_path(config.resume).exists():
        raise NotACheckpoint("no such checkpoint", path=config.resume)
    chosen = Checkpoint.open(config.resume)
    chosen.require_resumable()
    if not chosen.is_complete:
        raise NotACheckpoint("the checkpoint is not complete: cannot resume", path=chosen.path)
    if not complete:
        require_no_unfinished(config.run)
    require_none_later(config.run, complete, chosen)
    return [chosen.path]


def require_none_later(run: Path, complete: Sequence[Checkpoint], chosen: Checkpoint) -> None:
    """Raise `Occupied` if the run's `complete` checkpoints, newest first, do not start with the `chosen` one.

    The run would repeat their steps, and its metrics and checkpoints would be those of two trainings.
    """
    place = chosen.path.resolve()
    later = [*takewhile(lambda one: one.path.resolve() != place, complete)][::-1]
    if later:
        names = ", ".join(one.name for one in later[:_NAMED]) + (", ..." if len(later) > _NAMED else "")
        if len(later) < len(complete):
            message = f"the run has checkpoints after {chosen.name}: {names}"
        else:
            message = f"the run already has checkpoints, and {chosen.path} is not one of them: {names}"
        settings = chosen.path.parent / SETTINGS
        config = f" --config {shlex.quote(str(settings))}" if settings.is_file() else ""
        command = f"ckptkit train NEW --resume {shlex.quote(str(chosen.path))}{config}"
        raise Occupied(message, path=run, hint=f"train into a new run: `{command}`")


def require_no_unfinished(run: Path) -> None:
    """Raise `Occupied` if the run has only unfinished checkpoints: its first save would find one in its place.

    In a store the save replaces what an earlier one left.
    """
    names = [one.name for one in ([] if is_remote(run) else named_in(run))]
    if names:
        message = f"the run has only unfinished checkpoints: {', '.join(names)}"
        raise Occupied(message, path=run, hint="move them away, or name another run")


def first_readable(found: Sequence[Path]) -> Path:
    """Return the first checkpoint whose metadata is undamaged. Raises the error of the first if there is none."""
    errors: list[Exception] = []
    for path in found:
        try:
            _ = Checkpoint.open(path).layout
        except (Corrupt, Unsafe, Unsupported) as error:
            errors.append(error)
        else:
            return path
    raise errors[0]


def load_newest(trainer: Trainer, run: Run, found: Sequence[Path], ranks: Ranks, warn: Callable[[str], None]) -> None:
    """Load the first of `found` that is undamaged, on all ranks.

    The damaged ones before it get another name, since the run will save those steps again; in a store, which renames
    nothing, they are replaced then. Raises the error of the first if none can be loaded.
    """
    damaged: dict[Path, CkptError] = {}
    for path in found:
        try:
            trainer.load(run, path)
        except (Corrupt, Unsafe, Unsupported) as error:
            damaged[path] = error
            continue
        for other, why in damaged.items():
            then = give_up(other, run, ranks)
            warn(f"warning: {other} cannot be loaded: {why.message}; resuming from {path}, {then}")
        return
    raise next(iter(damaged.values()))


def give_up(path: Path, run: Run, ranks: Ranks) -> str:
    """Let the run save the step of a damaged checkpoint again, on all ranks. Returns what becomes of it, in words."""
    if is_remote(path):
        run.replace(path)
        return f"{path.name} is replaced when its step is saved again"
    return f"{path.name} is now {ranks.on_first(partial(set_aside, path)).name}"


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, and return its new path."""
    place = path.with_name(_DAMAGED + path.name)
    with translate_os_errors(path):
        move_into_place(path, place, overwrite=False)
    return place
