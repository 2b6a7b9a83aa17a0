"""List every checkpoint of a run, complete or not, with its metrics, by names, sizes and small files.

"Complete" means that the file that is written last is there, and that no file is shorter than a manifest or the
metadata say. ls does not read the metadata of a very large checkpoint, which takes seconds, or of one in a store: then
`sizes_compared` is false. `verify` checks whether every shard is undamaged.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.checkpoints.checkpoint import (
    Checkpoint,
    Source,
    checkpoints_in,
    find_latest,
    name_of,
    no_checkpoint,
    path_of,
    runs_in,
)
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.examination import examine, examine_checkpoint
from ckptkit.checkpoints.examination.inconsistency import Certainty
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.one_of_several import find_parts
from ckptkit.checkpoints.replaceable import is_made_of_another
from ckptkit.errors import (
    CkptError,
    Corrupt,
    IOFailure,
    Unsafe,
    Unsupported,
    translate_os_errors,
)
from ckptkit.formats import detect_format
from ckptkit.formats.rank_names import find_set
from ckptkit.io.claims import StoreClaim, claimed_in, read_claim
from ckptkit.io.destination import CLAIM
from ckptkit.io.file import absent, children, file_size, is_there
from ckptkit.io.joined import roots_of
from ckptkit.io.path import is_remote, refresh
from ckptkit.runs.pins import pinned_in
from ckptkit.runs.retention import read_metrics
from ckptkit.summary import Summarized
from ckptkit.trainers import stem_of, step_of
from ckptkit.trainers.trackers import Tracker, trackers_in
from ckptkit.words import count, format_bytes

_MOST_METADATA = 1 << 23  # bytes: a second of reading


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint of a run. `step`, `format`, `trainer` and `world_size` are None where no name tells them.

    `nbytes` counts all its files; `saved_at` is the time of the newest file, in seconds since 1970; `metrics` are those
    that were saved with it. `problem` says in few words what is wrong, None if nothing is. `named_by` are the tracker
    files that name it. One that `is_weights_only` is a model: no training can resume from it. `claim` is of
    an unfinished upload or deletion in a store: it may be at work, or have died. Where `sizes_compared` is false, only
    names tell that it is complete.
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
        """Return the name of its directory or file."""
        return name_of(self.path)


@dataclass(frozen=True, slots=True)
class Listing(Summarized):
    """The checkpoints of the run in directory `root`, oldest first; those without a step come last.

    `latest` is the complete checkpoint that a latest-checkpoint file names, else the one with the highest step; None if
    you asked for a single checkpoint. `tracker` says in words what the tracker files of other trainers mean. `runs` are
    the runs in a directory that is no run itself.
    """

    root: Path
    checkpoints: tuple[Listed, ...]
    latest: Path | None
    tracker: str | None
    runs: tuple[Path, ...] = ()

    def summary(self) -> Iterator[str]:
        total = format_bytes(sum(one.nbytes for one in self.checkpoints))
        yield f"{self.root}: {count(len(self.checkpoints), 'checkpoint')}, {total}"
        if self.latest is not None:
            yield f"latest: {self.latest.name}"


def ls(run: Source) -> Listing:
    """List the checkpoints of the run at `run`, of a folder of checkpoints, or the one checkpoint that is there.

    Reads no tensors, and metadata only if it is small. Raises `NotACheckpoint` if there is none.
    """
    root = refresh(path_of(run))
    with translate_os_errors(root):
        if not root.exists():
            raise absent(root)
        found = checkpoints_in(root)
        is_run = bool(found)
        runs: list[Path] = []
        if not is_run:
            found, runs = checkpoints_at(root), runs_in(root)
            root = root.parent if found[0].path == root else root
        pins, trackers = pinned_in(root), trackers_in(root)
        listed = [look_at(one, pins, trackers, runs) for one in found]
        listed += [look_at_upload(path) for path in claimed_in(root)] if is_run else []
    latest = find_latest(root).checkpoint if is_run else None
    tracker = say_tracked(trackers, listed) if is_run else None
    return Listing(root, tuple(listed), latest.path if latest else None, tracker, tuple(runs))


list_run = ls  # its name in earlier versions


def checkpoints_at(path: Path) -> list[Checkpoint]:
    """Return the checkpoint at a path that is no run; where models lie in a folder, each of them.

    Raises `NotACheckpoint` if there is none.
    """
    here = Checkpoint.at(path)
    if files := (outputs_in(here) or files_in(here)):
        return [Checkpoint.at(file) for file in files]
    models = [part.path for part in here.models]
    is_folder = here.own_step is None and (len(models) > 1 or len(models) == len(here.components))
    if models and is_folder and not here.is_direct:
        return [Checkpoint.at(model) for model in models]
    if not here.components and here.unreadable is None:
        raise no_checkpoint(path)
    return [here]


def outputs_in(here: Checkpoint) -> list[Path]:
    """Return the files and directories that are a checkpoint each in a folder with outputs of ckptkit; else []."""
    if here.own_step is not None or not here.path.is_dir() or is_there(here.path / MANIFEST):
        return []
    if not all(part.is_model for part in here.components):
        return []  # the directories of one checkpoint
    there = [path for path in children(here.path) if not path.name.startswith(".")]
    if not any(is_made_of_another(path) for path in there):
        return []
    return [path for path in there if (detect_format(path) if path.is_file() else Checkpoint.at(path).is_direct)]


def files_in(here: Checkpoint) -> list[Path]:
    """Return the files in a folder that are a checkpoint each; [] if it is one checkpoint, or has files of ranks."""
    if here.own_step is not None or not here.path.is_dir() or not here.is_direct:
        return []
    files = [path for path in children(here.path) if path.is_file() and detect_format(path)]
    if len(files) < 2 or find_set(files[0].name, [file.name for file in files]):
        return []
    return files if any(isinstance(problem, Unsupported) for problem in here.problems()) else []


def look_at(
    checkpoint: Checkpoint, pins: frozenset[str], trackers: Sequence[Tracker], others: Collection[Path] = ()
) -> Listed:
    """Return what the names and sizes of its files, and small files, tell about one checkpoint.

    The directories `others` do not belong to it.
    """
    fault, sizes_compared = fault_of(checkpoint), can_compare_sizes(checkpoint)
    if fault is None and sizes_compared:
        fault = fault_in_metadata(checkpoint)
    metrics, unreadable = metrics_of(checkpoint.path)
    nbytes, saved_at = measure(checkpoint.path, others)
    return Listed(
        checkpoint.path,
        checkpoint.own_step,
        next((part.reader.name for part in checkpoint.components), None),
        fault is None,
        checkpoint.world_size,
        nbytes,
        saved_at,
        metrics,
        checkpoint.name in pins,
        fault or unreadable,
        tuple(tracker.name for tracker in trackers if tracker.means(checkpoint.path)),
        checkpoint.is_weights_only,
        checkpoint.named_trainer,
        read_claim(checkpoint.path),
        sizes_compared,
    )


def look_at_upload(path: Path) -> Listed:
    """Return what is known of a file of which no byte is visible before its upload has ended."""
    claim = path.parent / f"{path.name}{CLAIM}"
    step, saved_at = step_of(Path(stem_of(path.name))), claim.stat().st_mtime
    return Listed(path, step, None, False, None, 0, saved_at, {}, False, "absent", claim=read_claim(path))


def fault_of(checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint does not count as complete, in few words."""
    try:
        problem = next(iter(checkpoint.problems()), None)
    except IOFailure:
        if checkpoint.path.exists():
            raise
        return "deleted meanwhile"
    if problem is None:
        return None
    place = problem.path
    return problem.message if place in (None, checkpoint.path) else f"{place.name} {problem.message}"


def can_compare_sizes(checkpoint: Checkpoint) -> bool:
    """Return whether a manifest or metadata that is quick to read says how large the files of a checkpoint are."""
    if is_remote(checkpoint.path):
        return False
    try:
        parts = checkpoint.components
        return bool(parts) and sum(part.reader.metadata_bytes(part.path) for part in parts) <= _MOST_METADATA
    except (Corrupt, IOFailure, Unsafe):
        return False


def fault_in_metadata(checkpoint: Checkpoint) -> str | None:
    """Return what in a checkpoint is not as its manifest or metadata say, in few words."""
    found: list[CkptError] = []
    try:
        layouts = [part.reader.read(part.path, found.append) for part in checkpoint.components]
        found += (problem for part in checkpoint.components for problem in wrong_sizes(part))
    except (Corrupt, IOFailure, Unsafe) as error:
        found.append(error)
    except Unsupported:  # nothing is known of its files
        return None
    if found:
        return describe(found[0], checkpoint.path) if checkpoint.path.exists() else "deleted meanwhile"
    if checkpoint.path.is_file() and (part := find_parts(checkpoint)):
        return part.message
    odd = examine(layouts[0]) if len(layouts) == 1 else examine_checkpoint(checkpoint)
    return next((one.line for one in odd if one.certainty is Certainty.CERTAIN), None)


def wrong_sizes(part: Component) -> Iterator[Corrupt]:
    """Yield the files of a part whose size is not the one in its manifest. A damaged manifest is left to `verify`."""
    place = part.path if part.path.is_dir() else part.path.parent
    try:
        known = part.manifest.files if part.manifest else {}
    except (Corrupt, Unsafe):
        return
    for name, recorded in known.items():
        if (size := file_size(place / name)) != recorded.nbytes:
            yield Corrupt(f"expected {recorded.nbytes} bytes (manifest), found {size}", path=place / name)


def describe(error: CkptError, checkpoint: Path) -> str:
    """Return a problem in one line, without what is above the checkpoint."""
    path = error.path
    if path is None or path == checkpoint or not path.is_relative_to(checkpoint):
        return error.message
    return f"{path.relative_to(checkpoint)}: {error.message}"


def metrics_of(path: Path) -> tuple[dict[str, float], str | None]:
    """Return the metrics of a checkpoint without its step, and what is wrong if they cannot be read."""
    if not path.is_dir():
        return {}, None
    try:
        metrics = read_metrics(path)
    except (Corrupt, IOFailure, Unsafe, Unsupported):
        return {}, "unreadable metrics"
    return {name: value for name, value in metrics.items() if name != "step"}, None


def measure(path: Path, others: Collection[Path] = ()) -> tuple[int, float]:
    """Return the bytes of all files below a path, and when the newest of them was changed, except manifests.

    The directories `others` are left out. Links are not followed.
    """
    waiting, nbytes, newest = [place.resolve() for place in roots_of(path)], 0, 0.0
    left_out = {other.resolve() for other in others}
    while waiting:
        found = waiting.pop()
        if found in left_out:
            continue
        with translate_os_errors(found):
            state = found.lstat()
            if stat.S_ISDIR(state.st_mode):
                waiting.extend(children(found))
            elif stat.S_ISREG(state.st_mode):
                nbytes += state.st_size
                newest = max(newest, 0.0 if found.name == MANIFEST else state.st_mtime)
    return nbytes, newest or path.stat().st_mtime


def say_tracked(trackers: Sequence[Tracker], listed: Sequence[Listed]) -> str | None:
    """Return what the trackers mean, and whether that is complete."""
    return "; ".join(say(tracker, listed) for tracker in trackers) or None


def say(tracker: Tracker, listed: Sequence[Listed]) -> str:
    """Return what one tracker means."""
    meant = [one for one in listed if tracker.name in one.named_by]
    if not meant:
        return f"`{tracker.name}` says {tracker.target}, which does not exist"
    fault = "" if all(one.is_complete for one in meant) else ", which is not complete"
    return f"`{tracker.name}` says {meant[0].path.name}{fault}"
