"""The protocol that marks, protects and deletes the checkpoints of a run, on a disk or in a store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.entry_points import load
from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.io.joined import JoinedPath, joined, roots_of
from ckptkit.io.path import known_store, to_live_path
from ckptkit.io.stores import LOCAL


def require_complete(path: Path) -> None:
    """Raise `NotACheckpoint` if a path is no complete checkpoint."""
    if not (path.is_dir() and Checkpoint.at(path).is_complete):
        hint = f"run `ckptkit verify {path}` to see its problems, or `ckptkit ls {path.parent}` to list the others"
        raise NotACheckpoint("no complete checkpoint", path=path, hint=hint)


class WatchLease(Protocol):
    """What a watch of a run needs: a `lock` that its commands inherit, and the directory `folder` for its journal."""

    @property
    def lock(self) -> int:
        """Return the descriptor."""

    @property
    def folder(self) -> Path:
        """Return the directory."""

    def protect(self, checkpoint: Path) -> None:
        """Protect a checkpoint from now on. It may be gone already.

        Raises `Occupied` while another process is deleting checkpoints where only one process may.
        """

    def unprotect(self) -> None:
        """Protect no checkpoint any more."""

    def clock_ns(self) -> int:
        """Return the time in nanoseconds by the clock that dates the files of the run."""

    def require_place(self) -> None:
        """Raise `NotACheckpoint` if the run is no longer where the watch found it."""


class RunBackend(Protocol):
    """Who marks and deletes checkpoints of the run in directory `root`."""

    @property
    def root(self) -> Path:
        """Return the directory."""

    def refresh(self) -> None:
        """See the run as it is now."""

    def is_there(self) -> bool:
        """Return whether the directory of the run exists; where directories are only prefixes, it always does."""

    def pruning(self) -> AbstractContextManager[None]:
        """Begin to delete checkpoints. Raises `Occupied` where only one process may do that, and another one does."""

    def delete(self, checkpoint: Path) -> tuple[str, ...]:
        """Delete a checkpoint, inside a `with pruning()`, unless something holds it by now. Return what holds it.

        Whenever it ends, readers see all of the checkpoint, or nothing. Raises `IOFailure` if a file cannot be deleted:
        the next `delete` goes on.
        """

    def unfinished(self) -> dict[Path, str]:
        """Return the directories that a deletion left which did not end, each with words on that."""

    def work_on(self, checkpoint: Path) -> str | None:
        """Return in words why a directory must be left alone because of what others do there; None for no reason."""

    def holds(self, checkpoint: Path) -> tuple[str, ...]:
        """Return what keeps a checkpoint now, whatever the rules say: a pin, a tracker that names it, a watch."""

    def pin(self, checkpoint: Path) -> None:
        """Pin a complete checkpoint. Raises `NotACheckpoint` if it is not, `Occupied` if it may be going just now."""

    def unpin(self, checkpoint: Path) -> None:
        """Take back a pin. Nothing changes if the checkpoint is not pinned."""

    def watching(self, key: str, longest: float) -> AbstractContextManager[WatchLease]:
        """Be the only watch with this key, which handles a checkpoint for `longest` seconds at most.

        Raises `Occupied` if another watch has the key.
        """


def keeper_of(root: Path) -> RunBackend:
    """Return who keeps the run in directory `root`. Raises `Usage` for a store in which ckptkit deletes nothing."""
    keeper = LOCAL.keeper
    for place in roots_of(root):
        keeper = known_store(place).keeper
        if not keeper:
            hint = "manage this run with the tools of its store"
            raise Usage("ckptkit deletes only in local directories and on s3://", path=place, hint=hint)
        if keeper != LOCAL.keeper and isinstance(root, JoinedPath):
            hint = "name local directories, or one place on s3://"
            raise Usage("several directories of one run must be local", path=place, hint=hint)
    return cast(RunBackend, load(keeper)(root))


def run_of(source: Source) -> Path:
    """Return the path of a run or checkpoint that is to be changed: a local one, or one in a store.

    A URL is never taken for a copy in a local cache.
    """
    path = source.path if isinstance(source, Checkpoint) else source
    if isinstance(path, JoinedPath):
        return joined([run_of(place) for place in roots_of(path)])
    return to_live_path(path)


def refuse_checkpoint(path: Path) -> None:
    """Raise `NotACheckpoint` for a checkpoint in the place of the run that contains it."""
    if Checkpoint.at(path).own_step is not None:
        raise NotACheckpoint("this is a checkpoint, not a run", path=path, hint=f"pass the run, {path.parent}")


def find_holds(checkpoint: Path) -> tuple[str, ...]:
    """Return what keeps a checkpoint now, whatever the rules say; see `RunBackend.holds`."""
    return keeper_of(checkpoint.parent).holds(checkpoint)
