"""Find the checkpoints that a script saved in its run directory, and give a resume a copy of one."""

from __future__ import annotations

import os
import shutil
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

    Without any that is named by its step, that is the only file in the run that contains tensors and their step.
    """
    level = [run]
    for _ in range(_DEEPEST):
        for folder in level:
            named = [  # a checkpoint that is not complete has its step by its name alone
                (checkpoint.step if checkpoint.is_complete else checkpoint.step_in_name, checkpoint)
                for checkpoint in checkpoints_named_in_run(folder)
            ]
            if steps := {step: checkpoint for step, checkpoint in named if step is not None}:
                return steps
        level = [inner for folder in level for inner in sorted(list_directories(folder))]
    checkpoints = map(Checkpoint.at, files_of_checkpoint(run))
    found = {step: checkpoint for checkpoint in checkpoints if (step := find_step_inside(checkpoint)) is not None}
    return found if len(found) == 1 else {}  # each save replaces this file: its name has no step


def find_step_inside(checkpoint: Checkpoint) -> int | None:
    """Return the step among the entries of a complete checkpoint with tensors; None if none can be read."""
    if checkpoint.step_in_name is not None or not checkpoint.is_complete:
        return None
    try:
        steps = (checkpoint.read_plain_value(key) for file, key in step_keys() if not file)
        return next((step for step in steps if type(step) is int), None) if checkpoint.layout.tensors else None
    except (Corrupt, Unsupported):
        return None


def files_of_checkpoint(path: Path) -> list[Path]:
    """Return all files of a checkpoint, or the one that it is, as far as they are there while others write."""
    if path.is_file():
        return [path]
    return sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names)


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
                    text, number = file.read_text("utf-8"), "".join(filter(str.isdigit, wanted))
                    named_by_step = text.replace(trackers[file.name].target, number)
                    changed = text.replace(last, wanted) if last in text else named_by_step
                    (there / file.name).write_text(changed, "utf-8")
