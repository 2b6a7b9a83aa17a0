"""List all checkpoints of a run, complete or not, with their metrics, from file names, sizes and small files.

"Complete" means that the file written last exists, and that no file is shorter than the manifest or the metadata say.
For a very large checkpoint, whose metadata takes seconds to read, and for a checkpoint in a store, ls does not compare
sizes, and `sizes_compared` is false. `verify` checks that every shard is undamaged.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.checkpoints.checkpoint import (
    Checkpoint,
    Source,
    all_checkpoints_in_run,
    find_latest,
    no_checkpoint_error,
    nonempty_path_name,
    path_of_source,
    runs_in,
)
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.examination import examine_checkpoint, examine_layout
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.partial_file import find_partial_file_error
from ckptkit.checkpoints.replaceable import files_in_manifest
from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsafe, Unsupported, translate_os_errors
from ckptkit.formats import detect_format
from ckptkit.formats.rank_names import names_differing_in_rank
from ckptkit.io.claims import StoreClaim, find_claim, unpublished_files_in
from ckptkit.io.destination import CLAIM
from ckptkit.io.file import file_size, is_existing_path, list_children, missing_path_error, names_in
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import drop_cached_listing, is_remote
from ckptkit.runs.deletion import pinned_names_in
from ckptkit.runs.retention import read_metrics
from ckptkit.summary import Summarized
from ckptkit.trainers import find_step_of_path, name_without_suffixes
from ckptkit.trainers.trackers import Tracker, trackers_in
from ckptkit.words import count, format_bytes

_MOST_METADATA = 1 << 23  # bytes of metadata that ls reads, in about a second


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint of a run. `step`, `format`, `trainer` and `world_size` are None if file names do not show them.

    `nbytes` is the size of all its files; `saved_at` is the modification time of the newest file, in seconds since
    1970; `metrics` were saved with it. `problem` is a short description of a problem, or None. `named_by` are the
    latest-checkpoint files that name it. `is_weights_only` means that no training can resume from it. `claim` is an
    unfinished upload or deletion in a store, whose process may be running or dead. If `sizes_compared` is false,
    `is_complete` is based on file names only.
    """

    path: Path
    step: int | None
    format: str | None
    is_complete: bool
    world_size: int | None
    nbytes: int
    saved_at: float
    metrics: Mapping[str, float]
    is_pinned: bool
    problem: str | None
    named_by: tuple[str, ...] = ()
    is_weights_only: bool = False
    trainer: str | None = None
    claim: StoreClaim | None = None
    sizes_compared: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return nonempty_path_name(self.path)


@dataclass(frozen=True, slots=True)
class Listing(Summarized):
    """The checkpoints of the run in directory `root`, oldest first; checkpoints without a step come last.

    `latest` is the complete checkpoint that a latest-checkpoint file names, else the complete checkpoint with the
    highest step; None if `root` is a single checkpoint. `tracker` describes the latest-checkpoint files of other
    trainers. `runs` are the runs inside a directory that is not a run itself.
    """

    root: Path
    checkpoints: tuple[Listed, ...]
    latest: Path | None
    tracker: str | None
    runs: tuple[Path, ...] = ()

    def summary(self) -> Iterator[str]:
        total = format_bytes(sum(checkpoint.nbytes for checkpoint in self.checkpoints))
        yield f"{self.root}: {count(len(self.checkpoints), 'checkpoint')}, {total}"
        if self.latest is not None:
            yield f"latest: {self.latest.name}"


def ls(run: Source) -> Listing:
    """List the checkpoints of a run or of a directory of checkpoints, or a single checkpoint.

    Reads no tensors, and metadata only if it is small. Raises `NotACheckpoint` if there is no checkpoint.
    """
    root = drop_cached_listing(path_of_source(run))
    with translate_os_errors(root):
        if not root.exists():
            raise missing_path_error(root)
        checkpoints = all_checkpoints_in_run(root)
        is_run = bool(checkpoints)
        runs: list[Path] = []
        if not is_run:
            checkpoints, runs = checkpoint_or_models_at(root), runs_in(root)
            root = root.parent if checkpoints[0].path == root else root
        pins, trackers = pinned_names_in(root), trackers_in(root)
        listed = [make_listing_entry(checkpoint, pins, trackers, runs) for checkpoint in checkpoints]
        # a file that is being uploaded is invisible in its store until the upload ends
        for path in unpublished_files_in(root) if is_run else ():
            step = find_step_of_path(Path(name_without_suffixes(path.name)))
            saved_at = (path.parent / f"{path.name}{CLAIM}").stat().st_mtime
            claim = find_claim(path)
            listed.append(Listed(path, step, None, False, None, 0, saved_at, {}, False, "absent", claim=claim))
    try:
        latest = find_latest(root).checkpoint if is_run else None
    except IOFailure:
        if not any(checkpoint.unreadable for checkpoint in checkpoints):
            raise
        latest = None
    tracker = "; ".join(describe_tracker(tracker, listed) for tracker in trackers) if is_run else ""
    return Listing(root, tuple(listed), latest.path if latest else None, tracker or None, tuple(runs))


list_run = ls  # its name in earlier versions


def checkpoint_or_models_at(path: Path) -> list[Checkpoint]:
    """Return the checkpoint at a path that is not a run, or each model in a directory. Raises `NotACheckpoint`."""
    here = Checkpoint.at(path)
    if files := checkpoints_side_by_side_in(here):
        return [Checkpoint.at(file) for file in files]
    models = [component.path for component in here.models]
    is_folder = here.step_in_name is None and (len(models) > 1 or len(models) == len(here.components))
    if models and is_folder and not here.is_at_own_path:
        return [Checkpoint.at(model) for model in models]
    if not here.components and here.unsupported_files_error is None:
        raise no_checkpoint_error(path)
    return [here]


def checkpoints_side_by_side_in(directory: Checkpoint) -> list[Path]:
    """Return the outputs of ckptkit, or else the single-file checkpoints, in a directory that is no checkpoint itself.

    Returns [] if the files together are one checkpoint.
    """
    if directory.step_in_name is not None or not directory.path.is_dir():
        return []
    children = list_children(directory.path)
    paths = [path for path in children if not path.name.startswith(".")]
    # a manifest or training state shows that the directory is one checkpoint
    may_have_outputs = not is_existing_path(directory.path / MANIFEST) and all(
        component.is_model for component in directory.components
    )
    if may_have_outputs and any(files_in_manifest(path, only_if_converted=True) for path in paths):
        outputs = [
            path for path in paths if (detect_format(path) if path.is_file() else Checkpoint.at(path).is_at_own_path)
        ]
        if outputs:
            return outputs
    if not directory.is_at_own_path:
        return []
    files = [path for path in children if path.is_file() and detect_format(path)]
    if len(files) < 2 or names_differing_in_rank(files[0].name, [file.name for file in files]):
        return []
    return files if any(isinstance(problem, Unsupported) for problem in directory.problems()) else []


def make_listing_entry(
    checkpoint: Checkpoint,
    pins: frozenset[str] = frozenset(),
    trackers: Sequence[Tracker] = (),
    skipped_directories: Collection[Path] = (),
) -> Listed:
    """Return the entry of a checkpoint, from names, sizes and small files.

    `skipped_directories` inside are not part of it.
    """
    step, (nbytes, saved_at) = checkpoint.step_in_name, nbytes_and_time_below(checkpoint.path, skipped_directories)
    is_pinned = checkpoint.name in pins
    named_by = tuple(tracker.name for tracker in trackers if tracker.is_naming(checkpoint.path))
    if error := checkpoint.unreadable:
        problem = problem_in_one_line(error, checkpoint.path)
        return Listed(checkpoint.path, step, None, False, None, nbytes, saved_at, {}, is_pinned, problem, named_by)
    fault, sizes_compared = describe_first_problem(checkpoint), has_quick_file_sizes(checkpoint)
    if fault is None and sizes_compared:
        fault = find_metadata_contradiction(checkpoint)
    metrics: dict[str, float] = {}
    unreadable = None
    if checkpoint.path.is_dir():
        try:
            metrics = read_metrics(checkpoint.path)
        except (Corrupt, IOFailure, Unsafe, Unsupported):
            unreadable = "unreadable metrics"
    return Listed(
        checkpoint.path,
        step,
        next((component.reader.name for component in checkpoint.components), None),
        fault is None,
        checkpoint.world_size,
        nbytes,
        saved_at,
        {name: value for name, value in metrics.items() if name != "step"},
        is_pinned,
        fault or unreadable,
        named_by,
        checkpoint.is_weights_only,
        checkpoint.trainer_by_file_names,
        find_claim(checkpoint.path),
        sizes_compared,
    )


def describe_first_problem(checkpoint: Checkpoint) -> str | None:
    """Return a short description of why a checkpoint is not complete, None if it is."""
    try:
        problem = next(iter(checkpoint.problems()), None)
    except IOFailure:
        if checkpoint.path.exists():
            raise
        return "deleted meanwhile"
    if problem is None:
        return None
    path = problem.path
    return problem.message if path in (None, checkpoint.path) else f"{path.name} {problem.message}"


def has_quick_file_sizes(checkpoint: Checkpoint) -> bool:
    """Return True if the expected file sizes of a checkpoint are known from metadata that is quick to read."""
    if is_remote(checkpoint.path):
        return False
    try:
        parts = checkpoint.components
        return len(parts) > 0 and sum(part.reader.metadata_nbytes(part.path) for part in parts) <= _MOST_METADATA
    except (Corrupt, IOFailure, Unsafe):
        return False


def find_metadata_contradiction(checkpoint: Checkpoint) -> str | None:
    """Return a short description of a contradiction between a checkpoint and its manifest or metadata, or None."""
    problems: list[CkptError] = []
    try:
        layouts = [component.reader.read(component.path, problems.append) for component in checkpoint.components]
        problems += (problem for component in checkpoint.components for problem in wrong_size_errors(component))
        if not problems:
            if checkpoint.path.is_file() and (part := find_partial_file_error(checkpoint)):
                return part.message
            findings = examine_layout(layouts[0]) if len(layouts) == 1 else examine_checkpoint(checkpoint)
            certain = (finding.message_with_tensor for finding in findings if finding.certainty is Certainty.CERTAIN)
            return next(certain, None)
    except (Corrupt, IOFailure, Unsafe) as error:
        problems.append(error)
    except Unsupported:  # the metadata cannot be read, so the sizes are unknown
        return None
    return problem_in_one_line(problems[0], checkpoint.path) if checkpoint.path.exists() else "deleted meanwhile"


def wrong_size_errors(component: Component) -> Iterator[Corrupt]:
    """Yield an error for each file whose size differs from the manifest. `verify` reports a damaged manifest."""
    directory = component.path if component.path.is_dir() else component.path.parent
    try:
        known = component.manifest.files if component.manifest else {}
    except (Corrupt, Unsafe):
        return
    for name, recorded in known.items():
        if (size := file_size(directory / name)) != recorded.nbytes:
            yield Corrupt(f"expected {recorded.nbytes} bytes (manifest), found {size}", path=directory / name)


def problem_in_one_line(error: CkptError, checkpoint: Path) -> str:
    """Return a problem in one line, with a path relative to the checkpoint."""
    path = error.path
    if path is None or path == checkpoint or not path.is_relative_to(checkpoint):
        return error.message
    return f"{path.relative_to(checkpoint)}: {error.message}"


def nbytes_and_time_below(path: Path, skipped_directories: Collection[Path] = ()) -> tuple[int, float]:
    """Return the bytes of all files below a path, and the latest modification time of a file that is not a manifest.

    Skips the directories `skipped_directories` and those that may not be listed, and does not follow links.
    """
    pending, nbytes, newest = [root.resolve() for root in local_paths_of(path)], 0, 0.0
    skipped = {other.resolve() for other in skipped_directories}
    while pending:
        entry = pending.pop()
        if entry in skipped:
            continue
        with translate_os_errors(entry):
            status = entry.lstat()
            if stat.S_ISDIR(status.st_mode):
                with suppress(PermissionError):
                    pending.extend(entry / name for name in names_in(entry))
            elif stat.S_ISREG(status.st_mode):
                nbytes += status.st_size
                newest = max(newest, 0.0 if entry.name == MANIFEST else status.st_mtime)
    return nbytes, newest or path.stat().st_mtime


def describe_tracker(tracker: Tracker, listed: Sequence[Listed]) -> str:
    """Return which checkpoint a latest-checkpoint file names, and whether it is complete, as text."""
    named = [checkpoint for checkpoint in listed if tracker.name in checkpoint.named_by]
    if not tracker.target:
        return f"`{tracker.name}` names no checkpoint"
    if not named:
        return f"`{tracker.name}` says {tracker.target}, which does not exist"
    fault = "" if all(checkpoint.is_complete for checkpoint in named) else ", which is not complete"
    return f"`{tracker.name}` says {named[0].path.name}{fault}"
