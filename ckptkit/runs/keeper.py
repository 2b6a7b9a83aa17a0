"""The interface of the backends that pin, protect and delete the checkpoints of a run, on a disk or in a store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, named_in
from ckptkit.entry_points import load
from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.io.joined import JoinedPath, joined, roots_of
from ckptkit.io.path import known_store, to_live_path
from ckptkit.io.stores import LOCAL


def require_complete(path: Path) -> None:
    """Raise `NotACheckpoint` if a path is not a complete checkpoint."""
    if not (path.is_dir() and Checkpoint.at(path).is_complete):
        hint = f"run `ckptkit verify {path}` to see its problems, or `ckptkit ls {path.parent}` to list the others"
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

    def clock_ns(self) -> int:
        """Return the current time in nanoseconds, by the clock of the disk or store that the run is on."""

    def require_place(self) -> None:
        """Raise `NotACheckpoint` if the run was moved or deleted."""


class RunBackend(Protocol):
    """A backend that pins, protects and deletes the checkpoints of the run in directory `root`."""

    @property
    def root(self) -> Path:
        """Return the directory of the run."""

    def refresh(self) -> None:
        """Drop cached listings of the run."""

    def is_there(self) -> bool:
        """Return True if the directory of the run exists; always True in a store, where directories are prefixes."""

    def pruning(self) -> AbstractContextManager[None]:
        """Return a context for `delete`. Raises `Occupied` if deleting needs a lock that another process has."""

    def delete(self, checkpoint: Path) -> tuple[str, ...]:
        """Delete a checkpoint, unless it is protected by now. Call it inside `with pruning()`.

        Returns the reasons of the protection, () after the deletion. The deletion is atomic for readers, even if it is
        interrupted. Raises `IOFailure` if a file cannot be deleted; the next `delete` continues.
        """

    def unfinished(self) -> dict[Path, str]:
        """Return the directories of interrupted deletions, each with a description for the user."""

    def work_on(self, checkpoint: Path) -> str | None:
        """Return a description of the work that another process does in a directory, None without such work."""

    def holds(self, checkpoint: Path) -> tuple[str, ...]:
        """Return the reasons that protect a checkpoint from every rule: a pin, a latest-checkpoint file, a watch."""

    def pin(self, checkpoint: Path) -> None:
        """Pin a checkpoint. Raises `NotACheckpoint` if it is not complete, `Occupied` if it may be being deleted."""

    def unpin(self, checkpoint: Path) -> None:
        """Remove the pin of a checkpoint, if it has one."""

    def watching(self, key: str, longest: float) -> AbstractContextManager[WatchLease]:
        """Return a context in which this process is the only watch with `key`. Raises `Occupied` if another one runs.

        `longest` is the maximum time in seconds that the watch handles one checkpoint.
        """


def keeper_of(root: Path) -> RunBackend:
    """Return the backend of the run in directory `root`. Raises `Usage` for a store in which ckptkit cannot delete."""
    keeper = LOCAL.keeper
    for directory in roots_of(root):
        keeper = known_store(directory).keeper
        if not keeper:
            hint = "manage this run with the tools of its store"
            raise Usage("ckptkit deletes only in local directories and on s3://", path=directory, hint=hint)
        if keeper != LOCAL.keeper and isinstance(root, JoinedPath):
            hint = "name local directories, or one place on s3://"
            raise Usage("several directories of one run must be local", path=directory, hint=hint)
    return cast(RunBackend, load(keeper)(root))


def run_of(source: Source) -> Path:
    """Return the path of a run or checkpoint to change, never that of a copy in a local cache."""
    path = source.path if isinstance(source, Checkpoint) else source
    if isinstance(path, JoinedPath):
        return joined([run_of(directory) for directory in roots_of(path)])
    return to_live_path(path)


def refuse_checkpoint(path: Path) -> None:
    """Raise `NotACheckpoint` if `path` is a checkpoint instead of a run."""
    checkpoint = Checkpoint.at(path)
    if checkpoint.own_step is not None:
        raise NotACheckpoint("this is a checkpoint, not a run", path=path, hint=f"pass the run, `{path.parent}`")
    if checkpoint.is_direct and not named_in(path):
        hint = "pass a directory that contains checkpoints, such as ckpt-500"
        raise NotACheckpoint("this is one checkpoint, not a run", path=path, hint=hint)


def find_holds(checkpoint: Path) -> tuple[str, ...]:
    """Return the reasons that protect a checkpoint from every rule; see `RunBackend.holds`."""
    return keeper_of(checkpoint.parent).holds(checkpoint)
