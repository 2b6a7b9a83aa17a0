"""The interface of the backends that pin, protect and delete the checkpoints of a run, on a disk or in a store.

Also the backend of local runs, which uses locks and renames to delete, and small files to pin and protect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import Protocol, cast

from ckptkit import trainers
from ckptkit.checkpoints.checkpoint import Checkpoint, Source, step_checkpoints_in_run
from ckptkit.checkpoints.trainer_evidence import read_value_at_key
from ckptkit.entry_points import import_object
from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported, Usage, translate_os_errors
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.io.disk import lock_path
from ckptkit.io.file import list_directories
from ckptkit.io.joined_path import JoinedPath, join_paths, local_paths_of
from ckptkit.io.locks import is_locked
from ckptkit.io.path import capabilities_at, to_uncached_path
from ckptkit.io.staging import remove_orphaned_staging
from ckptkit.io.stores import LOCAL
from ckptkit.layout import KeyPath
from ckptkit.runs.deletion import (
    LocalLease,
    clear_pin,
    delete_checkpoint,
    is_handled_by_watch,
    is_pinned,
    locked_for_deletion,
    locked_watch,
    set_pin,
)
from ckptkit.trainers.trackers import trackers_in
from ckptkit.words import command_line


def require_complete_checkpoint(path: Path) -> None:
    if not (path.is_dir() and Checkpoint.at(path).is_complete):
        verify, ls = command_line("verify", path), command_line("ls", path.parent)
        hint = f"run {verify} to see its problems, or {ls} to list the others"
        raise NotACheckpoint("no complete checkpoint", path=path, hint=hint)


class WatchLease(Protocol):
    """The claim of a watch on a run: a `lock` that its commands inherit, and the directory `folder` for its journal."""

    @property
    def lock(self) -> int:
        """Return the file descriptor of the lock."""

    @property
    def folder(self) -> Path:
        """Return the directory of the journal."""

    def protect(self, checkpoint: Path) -> None:
        """Protect a checkpoint, which may be gone. Raises `Occupied` if another process is deleting with a lock."""

    def unprotect(self) -> None:
        """End the protection."""

    def now_ns(self) -> int:
        """Return the current time in nanoseconds, by the clock of the disk or store that the run is on."""

    def require_unmoved_run(self) -> None:
        """Raise `NotACheckpoint` if the run was moved or deleted."""


class RunBackend(Protocol):
    """A backend that pins, protects and deletes the checkpoints of the run in directory `root`."""

    @property
    def root(self) -> Path:
        """Return the directory of the run."""

    def drop_cached_listings(self) -> None:
        """Drop cached listings of the run."""

    def run_exists(self) -> bool:
        """Return True if the directory of the run exists; always True in a store, where directories are prefixes."""

    def pruning(self) -> AbstractContextManager[None]:
        """Return a context for `delete_checkpoint`. Raises `Occupied` if another process has the lock for deleting."""

    def delete_checkpoint(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        """Delete a checkpoint, unless it is protected by now. Call it inside `with pruning()`.

        With `by_trainer`, the trainer has chosen it now, and does not protect the best that it recorded before. Returns
        the reasons of the protection, () after the deletion. The deletion is atomic for readers, even if it is
        interrupted. Raises `IOFailure` if a file cannot be deleted; the next `delete_checkpoint` continues.
        """

    def unfinished_deletions(self) -> dict[Path, str]:
        """Return the directories of interrupted deletions, each with a description for the user."""

    def find_other_process_work(self, checkpoint: Path) -> str | None:
        """Return a description of the work that another process does in a directory, None without such work."""

    def find_protections(self, checkpoint: Path) -> tuple[str, ...]:
        """Return the reasons that protect a checkpoint from every rule: a pin, a latest-checkpoint file, a watch."""

    def pin(self, checkpoint: Path) -> None:
        """Pin a checkpoint. Raises `NotACheckpoint` if it is not complete, `Occupied` if it may be being deleted."""

    def unpin(self, checkpoint: Path) -> None:
        """Remove the pin of a checkpoint, if it has one."""

    def watching(self, key: str, max_handling_seconds: float) -> AbstractContextManager[WatchLease]:
        """Return a context in which this process is the only watch with `key`. Raises `Occupied` if another one runs.

        `max_handling_seconds` is the maximum time in seconds that the watch handles one checkpoint.
        """


def open_run_backend(root: Path) -> RunBackend:
    """Return the backend of the run in directory `root`. Raises `Usage` for a store in which ckptkit cannot delete."""
    keeper = LOCAL.keeper
    for directory in local_paths_of(root):
        keeper = capabilities_at(directory).keeper
        if not keeper:
            hint = "manage this run with the tools of its store"
            raise Usage("ckptkit deletes only in local directories and on s3://", path=directory, hint=hint)
        if keeper != LOCAL.keeper and isinstance(root, JoinedPath):
            hint = "name local directories, or one place on s3://"
            raise Usage("several directories of one run must be local", path=directory, hint=hint)
    return cast(RunBackend, import_object(keeper)(root))


def uncached_path_of(source: Source) -> Path:
    """Return the path of a run or checkpoint to change, never that of a copy in a local cache."""
    path = source.path if isinstance(source, Checkpoint) else source
    if isinstance(path, JoinedPath):
        return join_paths([uncached_path_of(directory) for directory in local_paths_of(path)])
    return to_uncached_path(path)


def refuse_checkpoint_as_run(path: Path) -> None:
    """Raise `NotACheckpoint` if `path` is a checkpoint instead of a run."""
    checkpoint = Checkpoint.at(path)
    if checkpoint.step_in_name is not None:
        raise NotACheckpoint("this is a checkpoint, not a run", path=path, hint=f"pass the run, `{path.parent}`")
    if checkpoint.is_at_own_path and not step_checkpoints_in_run(path):
        hint = "pass a directory that contains checkpoints, such as ckpt-500"
        raise NotACheckpoint("this is one checkpoint, not a run", path=path, hint=hint)


def protections_of(checkpoint: Path) -> tuple[str, ...]:
    """Return the reasons that protect a checkpoint from every rule; see `RunBackend.find_protections`."""
    return open_run_backend(checkpoint.parent).find_protections(checkpoint)


@lru_cache(maxsize=4096)  # prune checks each checkpoint against the entries of all others
def read_best_names(path: Path, file: str, key: KeyPath, modified_ns: int) -> tuple[tuple[str, str], ...]:  # noqa: ARG001
    """Return the checkpoint names at a key path of a small file or of a checkpoint's entries, each with a reason.

    `modified_ns` is the modification time of `path`, and part of the cache key.
    """
    # Windows paths have backslashes; PureWindowsPath also splits at slashes
    values = [read_value_at_key(path, key)] if file else read_values_matching_key(path, key)
    names = (PureWindowsPath(value).name for value in values if isinstance(value, str))
    return tuple((name, f"{file or 'the checkpoint'} says `{key[-1]}`") for name in names if name)


def read_values_matching_key(path: Path, key: KeyPath) -> Iterator[object]:
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
            with suppress(PermissionError):
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
        with locked_for_deletion(self.root):
            for directory in local_paths_of(self.root):
                remove_orphaned_staging(directory)
            yield

    def delete_checkpoint(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        reasons = self.find_protections(checkpoint, by_trainer=by_trainer)
        if not reasons:
            delete_checkpoint(checkpoint)
        return reasons

    def unfinished_deletions(self) -> dict[Path, str]:
        """Return {}: `pruning` has already finished interrupted deletions."""
        return {}

    def find_other_process_work(self, checkpoint: Path) -> str | None:
        with translate_os_errors(checkpoint):  # a process that replaces a checkpoint locks it
            is_being_written = any(is_locked(lock_path(path)) for path in local_paths_of(checkpoint))
        return "being written" if is_being_written else None

    def find_protections(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        """Return the reasons that protect a checkpoint, in any directory of the run."""
        paths = [root / checkpoint.name for root in local_paths_of(checkpoint.parent)]
        reasons = [reason for path in paths for reason in reasons_to_keep(path, by_trainer=by_trainer)]
        reasons += ["a watch is handling it"] if any(map(is_handled_by_watch, paths)) else []
        return tuple(dict.fromkeys(reasons))

    def pin(self, checkpoint: Path) -> None:
        """Pin a complete checkpoint, with the lock for deleting: without it, prune could delete it before the pin."""
        with locked_for_deletion(self.root, patience=_PATIENCE):
            require_complete_checkpoint(checkpoint)
            set_pin(checkpoint)

    def unpin(self, checkpoint: Path) -> None:
        clear_pin(checkpoint)

    @contextmanager
    def watching(self, key: str, max_handling_seconds: float) -> Iterator[WatchLease]:  # noqa: ARG002 - a lock ends with its process
        with locked_watch(self.root, key) as lock:
            yield LocalLease(self.root, key, lock)
