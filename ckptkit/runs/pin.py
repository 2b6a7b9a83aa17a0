"""Pin checkpoints, so that no retention rule deletes or demotes them, and unpin them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checks.verify import require_no_problems, verify_component
from ckptkit.errors import NotACheckpoint, Usage, names_and_more
from ckptkit.io.file import missing_path_error
from ckptkit.runs.deletion import is_pinned
from ckptkit.runs.ls import checkpoint_or_models_at
from ckptkit.runs.run_backend import open_run_backend, require_complete_checkpoint, uncached_path_of
from ckptkit.trainers import find_step_of_path
from ckptkit.words import command_line, count


def pin(*checkpoints: Source) -> list[Path]:
    """Pin checkpoints, so that `prune` and trainings do not delete them. Returns the paths of the checkpoints.

    For a run, pins its latest checkpoint. Runs are local or on S3. For a checkpoint on several disks, pins the first
    directory. Raises `NotACheckpoint` if a checkpoint is not complete, and `Corrupt` if `verify --fast` finds a problem
    such as a missing shard; nothing is pinned then. Raises `Usage` for a component of a checkpoint or a directory of
    models, and `Occupied` while another process is deleting checkpoints of the run.
    """
    chosen: dict[Path, None] = {}
    for source in checkpoints:
        path = uncached_path_of(source)
        open_run_backend(path).drop_cached_listings()
        if not path.exists():
            raise missing_path_error(path)
        checkpoint = Checkpoint.open(path)
        resolved = checkpoint.path.resolve()
        if find_step_of_path(resolved) is None and find_step_of_path(resolved.parent) is not None:
            hint = f"pin the whole checkpoint: {resolved.parent}"
            raise Usage("this is a part of a checkpoint", path=path, hint=hint)
        inside = [one.path for one in checkpoint_or_models_at(checkpoint.path)]
        if file := next((one for one in inside if not one.is_dir()), None):
            raise Usage(f"expected a directory, found the file {file.name}, which `prune` never deletes", path=path)
        if inside != [checkpoint.path]:
            names = names_and_more([one.name for one in inside], 3)
            message = f"expected a checkpoint, found a directory of {count(len(inside), 'model')}: {names}"
            raise Usage(message, path=path, hint=f"pin one of them: {inside[0]}")
        require_complete_checkpoint(resolved)
        hint = f"pin another checkpoint, or run {command_line('verify', resolved)}"
        for directory in checkpoint.component_paths:
            require_no_problems(verify_component(directory, fast=True), hint)
        chosen[resolved] = None
    for resolved in chosen:
        open_run_backend(resolved.parent).pin(resolved)
    return list(chosen)


def unpin(*checkpoints: Source) -> list[Path]:
    """Remove the pins of checkpoints, which need not exist any more. Returns the checkpoints that were pinned.

    Raises `NotACheckpoint`, and changes nothing, if a path is neither pinned nor a complete checkpoint.
    """
    chosen = list(dict.fromkeys(uncached_path_of(checkpoint).resolve() for checkpoint in checkpoints))
    for path in chosen:
        open_run_backend(path.parent).drop_cached_listings()
    pinned = [path for path in chosen if is_pinned(path)]
    for path in chosen:
        if path not in pinned and not (path.is_dir() and Checkpoint.at(path).is_complete):
            run = path if path.is_dir() else path.parent
            hint = f"run {command_line('ls', run)} to list the checkpoints and their pins"
            raise NotACheckpoint("neither pinned nor a complete checkpoint", path=path, hint=hint)
    for path in pinned:
        open_run_backend(path.parent).unpin(path)
    return pinned
