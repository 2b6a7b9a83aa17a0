"""Delete checkpoints: rename each out of sight first, then remove it from the disk.

A deletion that is interrupted never leaves half a checkpoint under its name; the next deletion finishes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptkit.errors import Occupied, translate_os_errors
from ckptkit.io.disk import again, lock_path, remove, sync_path
from ckptkit.io.file import children
from ckptkit.io.joined import roots_of
from ckptkit.io.locks import acquire, is_locked, release
from ckptkit.trainers import may_be_step_name

_LEAVING = ".leaving"  # ends the hidden name of a checkpoint that is being deleted


@contextmanager
def deleting(root: Path, *, patience: float = 0) -> Iterator[None]:
    """Be the only process that deletes checkpoints in directory `root`. First finish what a dead process began.

    If several directories are one run, all of them are locked. Raises `Occupied` if another process still holds a lock
    after `patience` seconds.
    """
    with ExitStack() as locks:
        for place in roots_of(root):
            locks.enter_context(locking(place, patience))
        finish_deleting(root)
        yield


@contextmanager
def locking(root: Path, patience: float) -> Iterator[None]:
    """Hold the lock for deleting in one directory."""
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
    """Delete a checkpoint inside a `with deleting(...)`; if it lies on several disks, from all of them.

    Raises `IOFailure` if a file cannot be removed: the checkpoint is out of sight then, and the next deletion goes on.
    """
    hidden = {place: place.with_name(f".{place.name}{_LEAVING}") for place in roots_of(checkpoint)}
    with translate_os_errors(checkpoint):
        for place, name in hidden.items():
            again(os.rename, place, name)
            sync_path(place.parent)  # before the first file goes: after a power cut all of it is back, or none
        for name in hidden.values():
            remove(name)


def finish_deleting(root: Path) -> None:
    """Remove what is left of checkpoints whose deletion was interrupted."""
    with translate_os_errors(root):
        for place in roots_of(root):
            for path in filter(is_hidden, children(place)):
                remove(path)


def is_hidden(path: Path) -> bool:
    name = path.name
    return name.startswith(".") and name.endswith(_LEAVING) and may_be_step_name(name[1 : -len(_LEAVING)])


def is_being_written(checkpoint: Path) -> bool:
    """Return whether a process holds the lock on an existing checkpoint in order to replace it."""
    with translate_os_errors(checkpoint):
        return any(is_locked(lock_path(place)) for place in roots_of(checkpoint))
