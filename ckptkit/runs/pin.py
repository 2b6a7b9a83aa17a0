"""Pin checkpoints, so that no retention rule deletes or demotes them, and unpin them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checks.verify import require_no_problems, verify_component
from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.io.file import missing_path_error
from ckptkit.runs.keeper import live_path_of, open_run_backend, require_complete_checkpoint
from ckptkit.runs.pins import is_pinned
from ckptkit.trainers import find_step_of_path


def pin(*checkpoints: Source) -> list[Path]:
    """Pin checkpoints, so that `prune` and trainings do not delete them. Returns the paths of the checkpoints.

    For a run, pins its latest checkpoint. Runs are local or on S3. For a checkpoint on several disks, pins the first
    directory. Raises `NotACheckpoint` if a checkpoint is not complete, and `Corrupt` if `verify --fast` finds a problem
    such as a missing shard; nothing is pinned then. Raises `Occupied` while another process is deleting checkpoints of
    the run.
    """
    chosen = list(dict.fromkeys(checkpoint_path_to_pin(live_path_of(checkpoint)) for checkpoint in checkpoints))
    for path in chosen:
        open_run_backend(path.parent).pin(path)
    return chosen


def unpin(*checkpoints: Source) -> list[Path]:
    """Remove the pins of checkpoints, which need not exist any more. Returns the checkpoints that were pinned.

    Raises `NotACheckpoint`, and changes nothing, if a path is neither pinned nor a complete checkpoint.
    """
    chosen = list(dict.fromkeys(live_path_of(checkpoint).resolve() for checkpoint in checkpoints))
    for path in chosen:
        open_run_backend(path.parent).drop_cached_listings()
    pinned = [path for path in chosen if is_pinned(path)]
    for path in chosen:
        if path not in pinned and not path.exists():
            hint = f"run `ckptkit ls {path.parent}` to list the checkpoints and their pins"
            raise NotACheckpoint("neither pinned nor a checkpoint", path=path, hint=hint)
        if path not in pinned:
            require_complete_checkpoint(path)
    for path in pinned:
        open_run_backend(path.parent).unpin(path)
    return pinned


def checkpoint_path_to_pin(path: Path) -> Path:
    """Return the resolved path of a checkpoint, or of the latest checkpoint of a run.

    Raises `NotACheckpoint` if it is not complete, `Corrupt` if files are missing or too short, and `Usage` for a
    component of a checkpoint.
    """
    open_run_backend(path).drop_cached_listings()
    if not path.exists():
        raise missing_path_error(path)
    checkpoint = Checkpoint.open(path)
    resolved = checkpoint.path.resolve()
    if find_step_of_path(resolved) is None and find_step_of_path(resolved.parent) is not None:
        raise Usage("this is a part of a checkpoint", path=path, hint=f"pin the whole checkpoint: {resolved.parent}")
    require_complete_checkpoint(resolved)
    for directory in checkpoint.component_paths:
        require_no_problems(
            verify_component(directory, fast=True), f"pin another checkpoint, or run `ckptkit verify {resolved}`"
        )
    return resolved
