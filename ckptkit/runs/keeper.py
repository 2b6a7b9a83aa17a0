"""The interface of the backends that pin, protect and delete the checkpoints of a run, on a disk or in a store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, checkpoints_named_in_run
from ckptkit.entry_points import import_object
from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.io.joined import JoinedPath, join_paths, local_paths_of
from ckptkit.io.path import capabilities_at, to_live_path
from ckptkit.io.stores import LOCAL
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

    def find_work_on(self, checkpoint: Path) -> str | None:
        """Return a description of the work that another process does in a directory, None without such work."""

    def find_protections(self, checkpoint: Path) -> tuple[str, ...]:
        """Return the reasons that protect a checkpoint from every rule: a pin, a latest-checkpoint file, a watch."""

    def pin(self, checkpoint: Path) -> None:
        """Pin a checkpoint. Raises `NotACheckpoint` if it is not complete, `Occupied` if it may be being deleted."""

    def unpin(self, checkpoint: Path) -> None:
        """Remove the pin of a checkpoint, if it has one."""

    def watching(self, key: str, longest: float) -> AbstractContextManager[WatchLease]:
        """Return a context in which this process is the only watch with `key`. Raises `Occupied` if another one runs.

        `longest` is the maximum time in seconds that the watch handles one checkpoint.
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


def live_path_of(source: Source) -> Path:
    """Return the path of a run or checkpoint to change, never that of a copy in a local cache."""
    path = source.path if isinstance(source, Checkpoint) else source
    if isinstance(path, JoinedPath):
        return join_paths([live_path_of(directory) for directory in local_paths_of(path)])
    return to_live_path(path)


def require_run(path: Path) -> None:
    """Raise `NotACheckpoint` if `path` is a checkpoint instead of a run."""
    checkpoint = Checkpoint.at(path)
    if checkpoint.step_in_name is not None:
        raise NotACheckpoint("this is a checkpoint, not a run", path=path, hint=f"pass the run, `{path.parent}`")
    if checkpoint.is_at_own_path and not checkpoints_named_in_run(path):
        hint = "pass a directory that contains checkpoints, such as ckpt-500"
        raise NotACheckpoint("this is one checkpoint, not a run", path=path, hint=hint)


def protections_of(checkpoint: Path) -> tuple[str, ...]:
    """Return the reasons that protect a checkpoint from every rule; see `RunBackend.find_protections`."""
    return open_run_backend(checkpoint.parent).find_protections(checkpoint)
