"""The backend of runs in a local directory, or in several directories that form one run.

It uses locks and renames to delete, and small files to pin and protect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from ckptkit import trainers
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.evidence import read_value_at_key
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported, translate_os_errors
from ckptkit.formats.archives.values import load_value
from ckptkit.io.disk import lock_path
from ckptkit.io.file import list_directories
from ckptkit.io.joined import local_paths_of
from ckptkit.io.locks import is_locked
from ckptkit.io.staging import remove_dead_leftovers
from ckptkit.layout import KeyPath
from ckptkit.runs import watches
from ckptkit.runs.deletion import delete_checkpoint, deleting
from ckptkit.runs.keeper import WatchLease, require_complete_checkpoint
from ckptkit.runs.pins import clear_pin, is_pinned, set_pin
from ckptkit.trainers.trackers import trackers_in


@lru_cache(maxsize=4096)  # prune checks each checkpoint against the entries of all others
def read_best_names(path: Path, file: str, key: KeyPath, changed: int) -> tuple[tuple[str, str], ...]:  # noqa: ARG001
    """Return the checkpoint names at a key path of a small file or of a checkpoint's entries, each with a reason.

    `changed` is the modification time of `path`, and part of the cache key.
    """
    # Windows paths have backslashes; PureWindowsPath also splits at slashes
    values = [read_value_at_key(path, key)] if file else values_at_key(path, key)
    names = (PureWindowsPath(value).name for value in values if isinstance(value, str))
    return tuple((name, f"{file or 'the checkpoint'} says `{key[-1]}`") for name in names if name)


def values_at_key(path: Path, key: KeyPath) -> Iterator[object]:
    """Yield the values of non-tensor entries at a key path, where "*" matches any key; none if unreadable."""
    try:
        layouts = [component.layout for component in Checkpoint.at(path).components]
        for layout in layouts:
            for name, blob in layout.blobs.items():
                entry_key = layout.key(name)
                if len(entry_key) == len(key) and all(map(fnmatchcase, map(str, entry_key), map(str, key))):
                    yield load_value(layout.root, blob)
    except (Corrupt, IOFailure, Unsafe, Unsupported):
        return


def reasons_to_keep(checkpoint: Path, *, by_trainer: bool = False) -> Iterator[str]:
    """Yield the reasons to keep a checkpoint in one directory of a run: pin, latest-checkpoint file, best metric.

    The best metric is no reason with `by_trainer`: see `RunBackend.delete_checkpoint`.
    """
    if is_pinned(checkpoint):
        yield "pinned"
    yield from (
        f"`{tracker.name}` names it" for tracker in trackers_in(checkpoint.parent) if tracker.is_naming(checkpoint)
    )
    if by_trainer:
        return
    # trainers record the best checkpoint in a small file of the run, or in an entry of a checkpoint
    run, best = checkpoint.parent, dict[str, None]()
    for directory in (run, *list_directories(run)):
        for file, key in trainers.best_keys():
            path = directory / file if file else directory
            if path.exists() and (file or directory != run):
                names = read_best_names(path, file, key, path.stat().st_mtime_ns)
                best.update((f"the best: {why}", None) for name, why in names if name == checkpoint.name)
    yield from best


_PATIENCE = 10.0  # seconds that `pin` waits for another process to finish deleting


@dataclass(frozen=True, slots=True)
class LocalKeeper:
    """The `RunBackend` of a run in the local directory `root`."""

    root: Path

    def drop_cached_listings(self) -> None:
        """Do nothing: local directories are not cached."""

    def run_exists(self) -> bool:
        with translate_os_errors(self.root):
            return self.root.is_dir()

    @contextmanager
    def pruning(self) -> Iterator[None]:
        """Lock the run for deleting inside the block, and remove the remains of dead processes first."""
        with deleting(self.root):
            for directory in local_paths_of(self.root):
                remove_dead_leftovers(directory)
            yield

    def delete_checkpoint(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        reasons = self.find_protections(checkpoint, by_trainer=by_trainer)
        if not reasons:
            delete_checkpoint(checkpoint)
        return reasons

    def unfinished_deletions(self) -> dict[Path, str]:
        """Return {}: `pruning` has already finished interrupted deletions."""
        return {}

    def find_work_on(self, checkpoint: Path) -> str | None:
        with translate_os_errors(checkpoint):  # a process that replaces a checkpoint locks it
            is_being_written = any(is_locked(lock_path(path)) for path in local_paths_of(checkpoint))
        return "being written" if is_being_written else None

    def find_protections(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        """Return the reasons that protect a checkpoint, in any directory of the run."""
        paths = [root / checkpoint.name for root in local_paths_of(checkpoint.parent)]
        reasons = [reason for path in paths for reason in reasons_to_keep(path, by_trainer=by_trainer)]
        reasons += ["a watch is handling it"] if any(map(watches.is_being_handled, paths)) else []
        return tuple(dict.fromkeys(reasons))

    def pin(self, checkpoint: Path) -> None:
        """Pin a complete checkpoint, with the lock for deleting: without it, prune could delete it before the pin."""
        with deleting(self.root, patience=_PATIENCE):
            require_complete_checkpoint(checkpoint)
            set_pin(checkpoint)

    def unpin(self, checkpoint: Path) -> None:
        clear_pin(checkpoint)

    @contextmanager
    def watching(self, key: str, longest: float) -> Iterator[WatchLease]:  # noqa: ARG002 - a lock ends with its process
        with watches.locked_watch(self.root, key) as lock:
            yield watches.LocalLease(self.root, key, lock)
