"""Protect the checkpoint that a watch is handling from deletion.

A watch has one file in the run, `.ckptkit-watch/KEY.lock`. It is locked as long as the watch lives, or a command that
the watch started and that outlived it. The file holds the name of the checkpoint that is being handled; without the
lock, the name means nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.errors import Corrupt, NotACheckpoint, Occupied, Unsafe, translate_os_errors
from ckptkit.io.disk import make_directories
from ckptkit.io.file import children, read_small
from ckptkit.io.locks import acquire, is_locked, is_same_file, release
from ckptkit.runs.deletion import deleting

FOLDER = ".ckptkit-watch"
_LOCK = ".lock"
_LIMIT = 1 << 12  # bytes of a name
_PATIENCE = 2.0  # seconds: whoever prunes looks at a lock for a moment by taking it, or sets a pin


@contextmanager
def claiming(root: Path, key: str) -> Iterator[int]:
    """Be the only watch with this key in the run at `root`. Gives the descriptor of the lock; a child may inherit it.

    Raises `Occupied` if another watch has the key.
    """
    folder = root / FOLDER
    path = lock_of(root, key)
    with translate_os_errors(folder):
        if folder.is_symlink():
            raise Unsafe(
                "refusing to follow a symbolic link in place of the notes of a watch", path=folder, hint="remove it"
            )
        make_directories(folder, sync=True)
        try:
            lock = acquire(path, patience=_PATIENCE)
        except Occupied as error:
            hint = "wait for it to end, or for the command that it had begun when it was killed"
            raise Occupied("another watch with the same commands handles this run", path=root, hint=hint) from error
    try:
        unprotect(lock)
        yield lock
    finally:
        release(lock, path)


def protect(lock: int, checkpoint: Path) -> None:
    """Protect a checkpoint from now on, by the lock of a watch. It may be gone already.

    Raises `Occupied` while another process is deleting checkpoints of the run.
    """
    with deleting(checkpoint.parent, patience=_PATIENCE):  # else it could go between a look at its holds and this
        write_name(lock, checkpoint.name)


def unprotect(lock: int) -> None:
    """Protect no checkpoint any more by the lock of a watch."""
    write_name(lock, "")


def clock_of(lock: int) -> int:
    """Return the time in nanoseconds by the clock of the file system that the run lies on."""
    os.utime(lock)
    return os.fstat(lock).st_mtime_ns


def require_place(lock: int, root: Path, key: str) -> None:
    """Raise `NotACheckpoint` if the run is no longer where the watch with this key found it."""
    with translate_os_errors(root):
        is_there = is_same_file(lock, lock_of(root, key))
    if not is_there:
        hint = "the run was moved or deleted while it was watched; its journal lists what was done"
        raise NotACheckpoint("the run is gone", path=root, hint=hint)


def lock_of(root: Path, key: str) -> Path:
    return root / FOLDER / f"{key}{_LOCK}"


def is_held(checkpoint: Path) -> bool:
    """Return whether a watch is handling a checkpoint just now."""
    folder = checkpoint.parent / FOLDER
    with translate_os_errors(folder):
        locks = [path for path in children(folder) if path.suffix == _LOCK] if folder.is_dir() else []
    return any(name_in(path) == os.fsencode(checkpoint.name) for path in locks)


def name_in(path: Path) -> bytes | None:
    """Return the name in the file of a lock, None if no process holds the lock."""
    with translate_os_errors(path):
        if not is_locked(path):
            return None
    try:
        return read_small(path, _LIMIT)
    except Corrupt:  # its owner let go of it just now
        return None


def write_name(lock: int, name: str) -> None:
    """Write the name of the checkpoint that is being handled into the file of a lock, "" for none."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, os.fsencode(name), 0)
