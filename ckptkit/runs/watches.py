"""Protect the checkpoint that a watch is handling from deletion.

A watch has one file in the run, `.ckptkit-watch/KEY.lock`. It stays locked while the watch runs, and while a command
runs that the watch started. The file contains the name of the checkpoint that the watch is handling. The name is valid
only while the file is locked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import Corrupt, NotACheckpoint, Occupied, Unsafe, translate_os_errors
from ckptkit.io.disk import make_directories
from ckptkit.io.file import list_children, read_small
from ckptkit.io.locks import acquire_lock, is_locked, is_same_file, release_lock
from ckptkit.runs.deletion import deleting

FOLDER = ".ckptkit-watch"
_LOCK = ".lock"
_LIMIT = 1 << 12  # bytes of a checkpoint's name
_PATIENCE = 2.0  # seconds to wait for a lock; prune takes it for a moment to test it, and pin to set a pin


@contextmanager
def locked_watch(root: Path, key: str) -> Iterator[int]:
    """Lock the watch `key` in the run at `root` inside the block. Yields a file descriptor that children may inherit.

    Raises `Occupied` if another watch has the key, and `Unsafe` for a symbolic link.
    """
    folder = root / FOLDER
    path = lock_file_of(root, key)
    with translate_os_errors(folder):
        if folder.is_symlink():
            message = "refusing to follow a symbolic link in place of the notes of a watch"
            raise Unsafe(message, path=folder, hint="remove it")
        make_directories(folder, sync=True)
        try:
            lock = acquire_lock(path, patience=_PATIENCE)
        except Occupied as error:
            hint = "wait for it to end, or for the command that it had begun when it was killed"
            raise Occupied("another watch with the same commands handles this run", path=root, hint=hint) from error
    try:
        write_protected_name(lock, "")
        yield lock
    finally:
        release_lock(lock, path)


@dataclass(frozen=True, slots=True)
class LocalLease:
    """The `WatchLease` of a watch on a run in local directory `root`. Its lock file names the protected checkpoint."""

    root: Path
    key: str
    lock: int

    @property
    def folder(self) -> Path:
        return self.root / FOLDER

    def protect(self, checkpoint: Path) -> None:
        # with the lock for deleting: prune must not delete it after it has looked for protections
        with deleting(checkpoint.parent, patience=_PATIENCE):
            write_protected_name(self.lock, checkpoint.name)

    def unprotect(self) -> None:
        write_protected_name(self.lock, "")

    def now_ns(self) -> int:
        with translate_os_errors(self.root):
            os.utime(self.lock)  # by the clock of the run's file system, which may differ from the local one
            return os.fstat(self.lock).st_mtime_ns

    def require_unmoved_run(self) -> None:
        require_unmoved_run(self.lock, self.root, self.key)


def require_unmoved_run(lock: int, root: Path, key: str) -> None:
    """Raise `NotACheckpoint` if the run of the watch `key` was moved or deleted."""
    with translate_os_errors(root):
        is_there = is_same_file(lock, lock_file_of(root, key))
    if not is_there:
        hint = "the run was moved or deleted while it was watched; its journal lists what was done"
        raise NotACheckpoint("the run is gone", path=root, hint=hint)


def lock_file_of(root: Path, key: str) -> Path:
    return root / FOLDER / f"{key}{_LOCK}"


def is_being_handled(checkpoint: Path) -> bool:
    folder = checkpoint.parent / FOLDER
    with translate_os_errors(folder):
        locks = [path for path in list_children(folder) if path.suffix == _LOCK] if folder.is_dir() else []
    for path in locks:
        with translate_os_errors(path):
            is_watching = is_locked(path)
        with suppress(Corrupt):  # the owner removed it after the check above
            if is_watching and read_small(path, _LIMIT) == os.fsencode(checkpoint.name):
                return True
    return False


def write_protected_name(lock: int, name: str) -> None:
    """Write the name of the protected checkpoint into a lock file, "" for none."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, os.fsencode(name), 0)
