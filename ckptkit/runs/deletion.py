"""Delete checkpoints: out of sight in one step and then from the disk, however often that is interrupted.

Decides nothing: which ones go is said elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptkit.errors import Occupied, translate_os_errors
from ckptkit.files.folders import children
from ckptkit.files.hidden import lock_path
from ckptkit.files.joined import roots_of
from ckptkit.files.locks import acquire, is_locked, release
from ckptkit.files.system import again
from ckptkit.files.trees import remove, sync_path
from ckptkit.trainers.steps import may_be_step_name

_LEAVING = ".leaving"  # ends the hidden name of a checkpoint that is being deleted


@contextmanager
def deleting(root: Path, *, patience: float = 0) -> Iterator[None]:
    """Let nobody else delete checkpoints in directory `root`; what others began and did not end is ended first.

    Several directories that are one are all protected. Raises `Occupied` if somebody else is at it, and still is after
    `patience` seconds.
    """
    with ExitStack() as locks:
        for place in roots_of(root):
            locks.enter_context(locking(place, patience))
        finish_deleting(root)
        yield


@contextmanager
def locking(root: Path, patience: float) -> Iterator[None]:
    """Hold the lock of those who delete in one directory."""
    path = lock_path(root / "prune")
    with translate_os_errors(root):
        try:
            lock = acquire(path, patience=patience)
        except Occupied as error:
            hint = "wait for it to end"
            raise Occupied("another process is deleting checkpoints here", path=root, hint=hint) from error
    try:
        yield
    finally:
        release(lock, path)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, under the protection of `deleting`; on several disks, from all.

    Raises `IOFailure` where a file cannot be removed: then it is out of sight, and whoever deletes next goes on.
    """
    hidden = {place: place.with_name(f".{place.name}{_LEAVING}") for place in roots_of(checkpoint)}
    with translate_os_errors(checkpoint):
        for place, name in hidden.items():
            again(os.rename, place, name)
            sync_path(place.parent)  # before the first file goes: after a power cut all of it is back, or none
        for name in hidden.values():
            remove(name)


def finish_deleting(root: Path) -> None:
    """Remove what is left of checkpoints that were being deleted when the process was ended."""
    with translate_os_errors(root):
        for place in roots_of(root):
            for path in filter(is_hidden, children(place)):
                remove(path)


def is_hidden(path: Path) -> bool:
    name = path.name
    return name.startswith(".") and name.endswith(_LEAVING) and may_be_step_name(name[1 : -len(_LEAVING)])


def is_being_written(checkpoint: Path) -> bool:
    """Return whether somebody holds the lock on a checkpoint that is there, to replace it."""
    with translate_os_errors(checkpoint):
        return any(is_locked(lock_path(place)) for place in roots_of(checkpoint))
