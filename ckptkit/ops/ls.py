"""Lists: every checkpoint of a run, complete or not, with what was measured then. Goes by names, sizes and small files.

No metadata is read: that of a large checkpoint takes seconds. So "complete" means written to its end, by the file that
is written last; whether every shard is there and undamaged is for `verify` to say.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.pins import pinned_in
from ckptkit.checkpoints.retention import read_metrics
from ckptkit.checkpoints.runs import children, find_parts, is_complete, is_weights_only, no_checkpoint, step_of
from ckptkit.checkpoints.trackers import Tracker, trackers_in
from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported, translate_os_errors
from ckptkit.files.file import names_in
from ckptkit.files.path import list_ahead, to_path
from ckptkit.formats import detect_format

_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")  # of a checkpoint that is one file
_NUMBER = re.compile(r"[0-9]{1,18}")
_OF_RANK = re.compile(r"-rank[0-9]+")  # which of Composer's files is whose
_RANK = re.compile(r"_rank_?([0-9]+)\.")  # whose file it is, in the names of Accelerate and verl


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint of a run. `step`, `format` and `world_size` are None where no name tells them.

    `nbytes` are those of all its files; `saved_at` is the time of the newest, in seconds since 1970; `metrics` is what
    was measured then. `problem` says in few words what is wrong, if anything is. `named_by` are the tracker files that
    mean it. One that `is_weights_only` is a model, and no training can go on from it.
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


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints of the run in directory `root`, oldest first; what has no step comes last.

    `latest` is the complete one with the highest step, None where only one was asked for; `tracker` is what the tracker
    files of other trainers say, in words.
    """

    root: Path
    checkpoints: tuple[Listed, ...]
    latest: Path | None
    tracker: str | None


def list_run(run: str | Path) -> Listing:
    """List the checkpoints of the run at `run`, or the one that lies there. Reads no tensor and no metadata.

    Raises `NotACheckpoint` if there is none.
    """
    root = to_path(run)
    with translate_os_errors(root):
        if not root.exists():
            raise NotACheckpoint("no such file or directory", path=root)
        found = find_in(root)
        is_run = bool(found)
        if not is_run:
            found, root = [one_at(root)], root.parent
        pins, trackers = pinned_in(root), trackers_in(root)
        listed = [look_at(path, pins, trackers) for path in found]
    listed.sort(key=lambda one: (one.step is None, one.step or 0, one.path.name))
    complete = [one.path for one in listed if is_run and one.is_complete and one.step is not None]
    tracker = say_tracked(trackers, listed) if is_run else None
    return Listing(root, tuple(listed), complete[-1] if complete else None, tracker)


def find_in(root: Path) -> list[Path]:
    """What is named like a checkpoint in a run, directory or file; and with these, other directories that are one."""
    if not root.is_dir():
        return []
    there = [path for path in children(root) if not path.name.startswith(".") and not path.is_symlink()]
    named = {path for path in there if step_in(path) is not None}
    list_ahead(named)
    return [path for path in there if path in named or (path.is_dir() and find_parts(path))] if named else []


def one_at(path: Path) -> Path:
    """The path itself, if it is a checkpoint and no run. Raises `NotACheckpoint` if it is not."""
    if not (find_parts(path) if path.is_dir() else detect_format(path)):
        raise no_checkpoint(path) if path.is_dir() else NotACheckpoint("no checkpoint in any known format", path=path)
    return path


def step_in(path: Path) -> int | None:
    """The step in the name of a checkpoint's directory or file. A mere number will do if a checkpoint is in there."""
    if path.is_dir():
        is_step = _NUMBER.fullmatch(path.name) and find_parts(path)
        return int(path.name) if is_step else step_of(path)
    return step_of(path.with_name(_OF_RANK.sub("", path.stem))) if path.suffix in _SUFFIXES else None


def look_at(path: Path, pins: frozenset[str], trackers: Sequence[Tracker]) -> Listed:
    """What can be told of one checkpoint by the names and sizes of its files, and by small ones."""
    parts = find_parts(path) if path.is_dir() else [path]
    formats = {part: reader for part in parts if (reader := detect_format(part))}
    fault = fault_of(path, [part for part in parts if part in formats])
    metrics, unreadable = metrics_of(path)
    nbytes, saved_at = measure(path)
    return Listed(
        path,
        step_in(path),
        next((reader.name for reader in formats.values()), None),
        fault is None,
        count_ranks(path, parts),
        nbytes,
        saved_at,
        metrics,
        path.name in pins,
        fault or unreadable,
        tuple(tracker.name for tracker in trackers if tracker.means(path)),
        is_weights_only(path),
    )


def fault_of(path: Path, parts: Sequence[Path]) -> str | None:
    """Why a checkpoint of these parts does not count as complete, in few words."""
    if not parts:
        return "no known format" if not path.is_dir() or children(path) else "empty"
    unfinished = [part for part in parts if not is_complete(part)]
    if not unfinished:
        return None
    return "unfinished" if unfinished[0] == path else f"{unfinished[0].name} unfinished"


def metrics_of(path: Path) -> tuple[dict[str, float], str | None]:
    """What was measured at a checkpoint, but for its step, and what is wrong if that cannot be read."""
    if not path.is_dir():
        return {}, None
    try:
        metrics = read_metrics(path)
    except (Corrupt, IOFailure, Unsafe, Unsupported):
        return {}, "unreadable metrics"
    return {name: value for name, value in metrics.items() if name != "step"}, None


def count_ranks(path: Path, parts: Sequence[Path]) -> int | None:
    """How many ranks have files of their own in a checkpoint, None if none has."""
    places = parts or [path, *(child for child in children(path) if child.is_dir())]
    ranks = {rank for place in places if place.is_dir() for rank in ranks_in(place)}
    return len(ranks) or None


def ranks_in(place: Path) -> Iterator[int]:
    """The ranks of which there are files in a directory."""
    reader = detect_format(place)
    for name in names_in(place):
        rank = reader.rank_of(name) if reader else None
        if rank is not None:
            yield rank
        elif match := _RANK.search(name):
            yield int(match[1])


def measure(path: Path) -> tuple[int, float]:
    """Bytes of all files below a path, and when the newest was changed, manifests apart. No link in it is followed."""
    waiting, nbytes, newest = [path.resolve()], 0, 0.0
    while waiting:
        found = waiting.pop()
        with translate_os_errors(found):
            state = found.lstat()
            if stat.S_ISDIR(state.st_mode):
                waiting.extend(children(found))
            elif stat.S_ISREG(state.st_mode):
                nbytes += state.st_size
                newest = max(newest, 0.0 if found.name == MANIFEST else state.st_mtime)
    return nbytes, newest or path.stat().st_mtime


def say_tracked(trackers: Sequence[Tracker], listed: Sequence[Listed]) -> str | None:
    """What the trackers mean, and whether that is complete."""
    return "; ".join(say(tracker, listed) for tracker in trackers) or None


def say(tracker: Tracker, listed: Sequence[Listed]) -> str:
    """What one tracker means."""
    meant = [one for one in listed if tracker.name in one.named_by]
    if not meant:
        return f"`{tracker.name}` says {tracker.target}, and there is none"
    fault = "" if all(one.is_complete for one in meant) else ", which is not complete"
    return f"`{tracker.name}` says {meant[0].path.name}{fault}"
