"""Find the checkpoints that a script saved in its run directory, and give a resume a copy of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, checkpoints_named_in_run
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.io.file import list_directories
from ckptkit.trainers import step_keys
from ckptkit.trainers.trackers import trackers_in

_DEEPEST = 4  # levels of directories: `logs/version_0/checkpoints` is three below a run
_SMALL = 1 << 20  # bytes of a file beside the checkpoints that a resume may need, such as settings


def checkpoints_by_step(run: Path) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by step, complete or not: those of the highest directory that has any.

    Without any that is named by its step, that is the only file in the run that contains its step.
    """
    for folder in directories_by_level(run):
        named = [  # a checkpoint that is not complete has its step by its name alone
            (checkpoint.step if checkpoint.is_complete else checkpoint.step_in_name, checkpoint)
            for checkpoint in checkpoints_named_in_run(folder)
        ]
        if steps := {step: checkpoint for step, checkpoint in named if step is not None}:
            return steps
    return find_overwritten_checkpoint(run)


def find_overwritten_checkpoint(run: Path) -> dict[int, Checkpoint]:
    """Return the only file in a run that contains tensors and their step, by this step; {} for several.

    Its name has no step, so each save replaces it.
    """
    checkpoints = map(Checkpoint.at, files_of_checkpoint(run))
    found = {step: checkpoint for checkpoint in checkpoints if (step := find_step_inside(checkpoint)) is not None}
    return found if len(found) == 1 else {}


def find_step_inside(checkpoint: Checkpoint) -> int | None:
    """Return the step among the entries of a complete checkpoint with tensors; None if none can be read."""
    if checkpoint.step_in_name is not None or not checkpoint.is_complete:
        return None
    try:
        steps = (checkpoint.read_plain_value(key) for file, key in step_keys() if not file)
        return next((step for step in steps if type(step) is int), None) if checkpoint.layout.tensors else None
    except (Corrupt, Unsupported):
        return None


def directories_by_level(run: Path) -> Iterator[Path]:
    """Return the run directory and the directories in it, level by level."""
    level = [run]
    for _ in range(_DEEPEST):
        yield from level
        level = [inner for folder in level for inner in sorted(list_directories(folder))]


def files_of_checkpoint(path: Path) -> list[Path]:
    """Return all files of a checkpoint, or the one that it is, as far as they are there while others write."""
    if path.is_file():
        return [path]
    return sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names)


def nbytes_of_checkpoint(path: Path) -> int:
    """Return the bytes of all files of a checkpoint or a run."""
    return sum(file.stat().st_size for file in files_of_checkpoint(path))


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, a directory or a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def copy_run_files(source: Path, target: Path, *, latest: tuple[str, str], without: str | None) -> None:
    """Copy the small files beside the checkpoints of a run, but for the file `without`.

    A latest-checkpoint file names the first of `latest` in the source, and the second in the copy.
    """
    last, wanted = latest
    for folder in (source, *(last_folder.parent for last_folder in source.rglob(last) if last_folder.parent != source)):
        there = target / folder.relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        trackers = {tracker.name: tracker for tracker in trackers_in(folder) if tracker.target}
        for file in folder.iterdir():
            if file.is_symlink():
                if file.readlink().name == last:
                    (there / file.name).symlink_to(file.readlink().with_name(wanted))
            elif file.is_file() and file.stat().st_size <= _SMALL and file.name not in (without, last, wanted):
                shutil.copy2(file, there / file.name)
                if file.name in trackers:
                    rewrite_tracker(there / file.name, trackers[file.name].target, last, wanted)


def rewrite_tracker(tracker: Path, target: str, last: str, wanted: str) -> None:
    """Write the name or the step of another checkpoint into a latest-checkpoint file."""
    text = tracker.read_text("utf-8")
    steps = {name: "".join(filter(str.isdigit, name)) for name in (last, wanted)}
    changed = text.replace(last, wanted) if last in text else text.replace(target, steps[wanted])
    tracker.write_text(changed, "utf-8")
