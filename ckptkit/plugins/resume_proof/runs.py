"""The runs of the script that the checks compare, each made when it is first needed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckptkit.checkpoints.checkpoint import Checkpoint, step_checkpoints_in_run
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.io.file import list_directories
from ckptkit.plugins.resume_proof.change import change_state_group
from ckptkit.plugins.resume_proof.compare import (
    ControlTolerance,
    GroupDifference,
    group_differences,
    measure_control_tolerance,
)
from ckptkit.plugins.resume_proof.execute import Execution, execute_command
from ckptkit.plugins.resume_proof.options import ScriptOptions
from ckptkit.plugins.resume_proof.states import MOMENTS, WEIGHTS, CheckpointContents, read_checkpoint_contents
from ckptkit.trainers import step_keys
from ckptkit.trainers.trackers import trackers_in
from ckptkit.training.smoke.run_check import CheckFailed, CheckSkipped

RUNS, COPIES, LOGS = "runs", "copies", "logs"  # directories below --run
STOPPED = "stopped"
_WRITTEN = 0.1  # seconds: files of a directory that did not change for so long are written to their end
_DEEPEST = 4  # levels of directories: `logs/version_0/checkpoints` is three below a run
_SMALL = 1 << 20  # bytes of a file beside the checkpoints that a resume may need, such as settings


class Cause(NamedTuple):
    """The group of state that makes a resumed run another one, how that shows, and what to do unless the group says."""

    group: str
    why: str
    hint: str | None = None


@dataclass
class Runs:
    """All executions of one script: `room` has their directories and logs; `nproc` is the number of ranks."""

    script: ScriptOptions
    room: Path
    out: Path
    nproc: int
    lost: list[str] = field(default_factory=list)  # groups of state that the script does not restore
    unread: list[str] = field(default_factory=list)  # groups that are not read, and at the end as they should be
    reached: dict[str, set[str]] = field(default_factory=dict)  # the groups at the end that a change of a group changes
    was_deleted: bool = False  # whether the first checkpoint was seen in a run that has deleted it at its end
    is_in_place: bool = False  # whether weights and moments were proved to be those of the checkpoint
    misloaded: list[Cause] = field(default_factory=list)  # what was not loaded into its place

    # the uninterrupted run

    @cached_property
    def uninterrupted(self) -> Execution:
        """Return the uninterrupted run, from 0 to the last step."""
        return self.start_run("whole")

    @cached_property
    def checkpoint_paths(self) -> dict[int, Path]:
        """Return the checkpoints of the uninterrupted run by step.

        If the script has replaced or deleted the first one, it comes from a run that is ended after the first save.
        """
        found = dict(self.kept_checkpoints)
        if self.script.steps in found and not self.has_kept_first_checkpoint:
            self.start_run(STOPPED, watch=lambda: self.find_first_saved() is not None)
            first = self.find_first_saved()
            found |= {self.script.save_every: first} if first else {}
        return {step: checkpoint.path for step, checkpoint in found.items()}

    @cached_property
    def kept_checkpoints(self) -> dict[int, Checkpoint]:
        return checkpoints_by_step(self.uninterrupted.run)

    @property
    def has_kept_first_checkpoint(self) -> bool:
        return self.script.save_every in self.kept_checkpoints

    @property
    def overwrites_checkpoints(self) -> bool:
        """Return whether the script writes each checkpoint over the one before."""
        return any(checkpoint.step_in_name is None for checkpoint in self.kept_checkpoints.values())

    def find_first_saved(self) -> Checkpoint | None:
        """Return the first checkpoint of the stopped run, once it has all its files; None while it does not."""
        expected = len(files_of_checkpoint(self.kept_checkpoints[self.script.steps].path))
        try:
            first = checkpoints_by_step(self.room / RUNS / STOPPED).get(self.script.save_every)
            self.was_deleted |= first is not None
            if first is None or not first.is_complete:
                return None
            files = files_of_checkpoint(first.path)
            age = time.time() - max(file.stat().st_mtime for file in files)
            return first if first.path.is_file() or (len(files) >= expected and age > _WRITTEN) else None
        except (OSError, CkptError):  # the script deletes it in this moment
            return None

    @property
    def middle_path(self) -> Path:
        return self.checkpoint_paths[self.script.save_every]

    @cached_property
    def middle_state(self) -> CheckpointContents:
        """Return the state that the resumed runs start from."""
        return read_checkpoint_contents(self.middle_path)

    @cached_property
    def last_state(self) -> CheckpointContents:
        """Return the state at the last step of the uninterrupted run."""
        return read_checkpoint_contents(self.checkpoint_paths[self.script.steps])

    @cached_property
    def control_tolerance(self) -> ControlTolerance:
        """Return by how much a second run of the same command differs."""
        with self.deleted_afterwards("control"):
            again = self.start_run("control")
            self.require_success(again, "the command was run a second time in another directory")
            return measure_control_tolerance(self.last_state, self.state_at_end(again))

    # resumed runs

    @cached_property
    def resumed_run(self) -> Execution:
        """Return the run that was resumed in the middle, from an unchanged copy."""
        return self.resume_run("resumed")

    @cached_property
    def resumed_state(self) -> CheckpointContents:
        """Return the state at the last step of the resumed run."""
        return self.state_at_end(self.resumed_run)

    @cached_property
    def is_finite(self) -> bool:
        """Return whether all weights at the last step of the resumed run are finite numbers."""
        names = self.resumed_state.names_in(WEIGHTS)
        return all(bool(np.isfinite(self.resumed_state.read_tensor(name)).all()) for name in names)

    @cached_property
    def group_differences(self) -> list[GroupDifference]:
        """Return in which groups the resumed run differs from the uninterrupted one at the last step."""
        return group_differences(self.last_state, self.resumed_state, self.control_tolerance)

    @property
    def has_other_weights(self) -> bool:
        """Return whether the resumed run has trained differently: to other weights or moments."""
        return any(gap.group in (WEIGHTS, MOMENTS) for gap in self.group_differences)

    def resume_with_changed_group(self, group: str) -> tuple[int, Execution, list[GroupDifference] | None]:
        """Resume from a copy with one group of state changed.

        Return the number of changed entries, the execution, and what differs at its end from the unchanged resume; None
        if it saved no checkpoint.
        """
        label = f"changed-{group.replace(' ', '-').lower()}"
        count = 0

        def change(path: Path) -> None:
            nonlocal count
            count = change_state_group(path, group)
            if not count:
                raise CheckSkipped("found nothing in it that can be changed")

        with self.deleted_afterwards(label):
            resumed = self.resume_run(label, change=change)
            if not resumed.is_done:
                return count, resumed, None
            changed = group_differences(self.resumed_state, self.state_at_end(resumed), self.control_tolerance)
            return count, resumed, changed

    # what all of them do

    def start_run(
        self, label: str, *, nproc: int | None = None, watch: Callable[[], bool] = lambda: False
    ) -> Execution:
        """Run the command from the beginning in a fresh directory."""
        run = self.room / RUNS / label
        return execute_command(self.script, run, self.log_path(label), nproc or self.nproc, watch=watch)

    def resume_run(
        self,
        label: str,
        *,
        source: Path | None = None,
        change: Callable[[Path], object] = lambda _: None,
        nproc: int | None = None,
    ) -> Execution:
        """Resume from a copy of the middle checkpoint, or of `source` in its place, after a `change` of the copy."""
        run = self.room / RUNS / label
        last = self.checkpoint_paths[self.script.steps]
        copy = run if self.script.is_resuming_by_itself else self.room / COPIES / label
        copy = (copy / last.relative_to(self.uninterrupted.run)).with_name(self.middle_path.name)
        if self.script.is_resuming_by_itself:
            without = self.script.find_loss_file_and_key[0] if self.script.find_loss_file_and_key else None
            latest = (last.name, self.middle_path.name)
            copy_files_beside_checkpoints(self.uninterrupted.run, run, renamed_latest=latest, excluded_file=without)
        source = source or self.middle_path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy2(source, copy)
        change(copy)
        return execute_command(self.script, run, self.log_path(label), nproc or self.nproc, checkpoint=copy)

    def state_at_end(self, execution: Execution) -> CheckpointContents:
        """Return the state that a finished run saved at the last step."""
        found = checkpoints_by_step(execution.run).get(self.script.steps)
        if found is None:
            raise CheckFailed(f"no checkpoint at step {self.script.steps} after it; output: {execution.log}")
        return read_checkpoint_contents(found.path)

    def require_success(self, execution: Execution, what: str, hint: str = "") -> None:
        """Raise `CheckFailed` unless a run ended by itself and without an error."""
        if not execution.is_done:
            raise CheckFailed(f"{what}: {execution.describe_failure()}{hint}")

    def require_resumed(self, execution: Execution, source: str, hint: str = "") -> None:
        """Raise `CheckFailed` unless a run that resumed from `source` ended by itself and without an error."""
        what = f"the script does not resume {source}"
        last = checkpoints_by_step(execution.run).get(self.script.steps)
        if last is not None and last.is_complete:
            ending = "does not end" if execution.exit_code is None else "fails"
            what = f"the script resumes {source}, saves step {self.script.steps}, and then {ending}"
        self.require_success(execution, what, hint)

    def log_path(self, label: str) -> Path:
        return self.room / LOGS / f"{label}.txt"

    @contextmanager
    def deleted_afterwards(self, label: str) -> Iterator[None]:
        """Delete the directories of a run at the end, unless they are to be kept: they need as much room as it."""
        try:
            yield
        finally:
            if not self.script.keep:
                for place in (RUNS, COPIES):
                    shutil.rmtree(self.room / place / label, ignore_errors=True)

    @cached_property
    def uninterrupted_losses_by_step(self) -> list[tuple[float, ...]] | None:
        """Return the losses of each step of the uninterrupted run; None if their number is not a multiple of the steps.

        There are several for each step if every rank prints its own.
        """
        found, steps = self.uninterrupted.losses, self.script.steps
        each, rest = divmod(len(found), steps)
        if not each or rest:
            return None
        return [tuple(sorted(found[i * each : (i + 1) * each])) for i in range(steps)]


def checkpoints_by_step(run: Path) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by step, complete or not: those of the highest directory that has any.

    Without any that is named by its step, that is the only file in the run that contains tensors and their step.
    """
    level = [run]
    for _ in range(_DEEPEST):
        for folder in level:
            named = [  # a checkpoint that is not complete has its step by its name alone
                (checkpoint.step if checkpoint.is_complete else checkpoint.step_in_name, checkpoint)
                for checkpoint in step_checkpoints_in_run(folder)
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


def copy_files_beside_checkpoints(
    source: Path, target: Path, *, renamed_latest: tuple[str, str], excluded_file: str | None
) -> None:
    """Copy the small files beside the checkpoints of a run, but for the file `excluded_file`.

    A latest-checkpoint file names the first of `renamed_latest` in the source, and the second in the copy.
    """
    last, wanted = renamed_latest
    for folder in (source, *(last_folder.parent for last_folder in source.rglob(last) if last_folder.parent != source)):
        there = target / folder.relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        trackers = {tracker.name: tracker for tracker in trackers_in(folder) if tracker.target}
        for file in folder.iterdir():
            if file.is_symlink():
                if file.readlink().name == last:
                    (there / file.name).symlink_to(file.readlink().with_name(wanted))
            elif file.is_file() and file.stat().st_size <= _SMALL and file.name not in (excluded_file, last, wanted):
                shutil.copy2(file, there / file.name)
                if file.name in trackers:
                    text, number = file.read_text("utf-8"), "".join(filter(str.isdigit, wanted))
                    named_by_step = text.replace(trackers[file.name].target, number)
                    changed = text.replace(last, wanted) if last in text else named_by_step
                    (there / file.name).write_text(changed, "utf-8")
