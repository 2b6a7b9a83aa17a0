"""Delete checkpoints, and protect them from deletion by pins and watches.

A deletion renames the checkpoint to a hidden name first, so an interrupted one never leaves a partial checkpoint under
its name. The next deletion finishes it.

A pin is an empty file `.pins/NAME` in the run, for the checkpoint NAME. Pins move with the run, but a copy of a
checkpoint elsewhere is not pinned. Setting a pin rewrites no file.

A watch has one file in the run, `.ckptkit-watch/KEY.lock`. It stays locked while the watch runs, and while a command
runs that the watch started. The file contains the name of the checkpoint that the watch is handling. The name is valid
only while the file is locked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import Corrupt, NotACheckpoint, Occupied, Unsafe, translate_os_errors
from ckptkit.io.disk import close_descriptor, lock_path, make_directories, remove_path, retry_interrupted, sync_path
from ckptkit.io.file import list_children, names_in, read_small
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.locks import acquire_lock, is_locked, is_same_file, release_lock
from ckptkit.trainers import is_like_checkpoint_name

_LEAVING = ".leaving"  # suffix of the hidden name of a checkpoint that is being deleted
PINS = ".pins"
WATCHES = ".ckptkit-watch"
_LOCK = ".lock"
_LIMIT = 1 << 12  # bytes of a checkpoint's name
_PATIENCE = 2.0  # seconds to wait for a lock; prune takes it for a moment to test it, and pin to set a pin


@contextmanager
def locked_for_deletion(root: Path, *, patience: float = 0) -> Iterator[None]:
    """Lock directory `root` for deleting inside the block. First finishes interrupted deletions of dead processes.

    Locks all directories of a run that is spread over several. Raises `Occupied` if another process still has a lock
    after `patience` seconds.
    """
    with ExitStack() as locks:
        for directory in local_paths_of(root):
            path = lock_path(directory / "prune")
            with translate_os_errors(directory):
                try:
                    lock = acquire_lock(path, timeout=patience)
                except Occupied as error:
                    message = "another process is deleting checkpoints here"
                    raise Occupied(message, path=directory, hint="wait for it to end") from error
            locks.callback(release_lock, lock, path)
        with translate_os_errors(root):
            for path in (path for directory in local_paths_of(root) for path in list_children(directory)):
                name = path.name.removeprefix(".").removesuffix(_LEAVING)
                if path.name == f".{name}{_LEAVING}" and is_like_checkpoint_name(name):
                    remove_path(path)
        yield


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, from all disks if it is spread over several. Call it inside `with locked_for_deletion(...)`.

    Raises `IOFailure` if a file cannot be removed. The checkpoint is hidden then, and the next deletion finishes it.
    """
    hidden = {path: path.with_name(f".{path.name}{_LEAVING}") for path in local_paths_of(checkpoint)}
    with translate_os_errors(checkpoint):
        for path, name in hidden.items():
            retry_interrupted(os.rename, path, name)
            # Before the first file is removed: after a power failure the checkpoint is complete or hidden.
            sync_path(path.parent)
        for name in hidden.values():
            remove_path(name)


def pinned_names_in(root: Path) -> frozenset[str]:
    folder = root / PINS
    with translate_os_errors(folder), suppress(FileNotFoundError):  # an unpin may remove the empty folder meanwhile
        if folder.is_dir():
            return frozenset(names_in(folder))
    return frozenset()


def is_pinned(checkpoint: Path) -> bool:
    return checkpoint.name in pinned_names_in(checkpoint.parent)


def set_pin(checkpoint: Path) -> None:
    """Pin a checkpoint and flush the pin to the disk. Does nothing if it is pinned."""
    folder = checkpoint.parent / PINS
    with translate_os_errors(folder):
        if folder.is_symlink():
            raise Unsafe("refusing to follow a symbolic link in place of the pins", path=folder, hint="remove it")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            retry_interrupted(folder.mkdir, exist_ok=True)
            with suppress(FileNotFoundError):  # an unpin has just removed the empty folder
                close_descriptor(retry_interrupted(os.open, folder / checkpoint.name, flags, 0o644))
                break
        sync_path(folder)
        sync_path(folder.parent)


def clear_pin(checkpoint: Path) -> None:
    """Unpin a checkpoint, which may be deleted already. Does nothing if it is not pinned."""
    folder = checkpoint.parent / PINS
    with translate_os_errors(folder):
        if folder.is_dir():
            # not flushed: if a power cut restores the pin, no checkpoint is lost
            retry_interrupted((folder / checkpoint.name).unlink, missing_ok=True)
            with suppress(OSError):  # there are other pins
                folder.rmdir()


@contextmanager
def locked_watch(root: Path, key: str) -> Iterator[int]:
    """Lock the watch `key` in the run at `root` inside the block. Yields a file descriptor that children may inherit.

    Raises `Occupied` if another watch has the key, and `Unsafe` for a symbolic link.
    """
    folder = root / WATCHES
    path = lock_file_of(root, key)
    with translate_os_errors(folder):
        if folder.is_symlink():
            message = "refusing to follow a symbolic link in place of the notes of a watch"
            raise Unsafe(message, path=folder, hint="remove it")
        make_directories(folder, sync=True)
        try:
            lock = acquire_lock(path, timeout=_PATIENCE)
        except Occupied as error:
            hint = "wait for it to end, or for the command that it had begun when it was killed"
            raise Occupied("another watch with the same commands handles this run", path=root, hint=hint) from error
    try:
        record_protected_name(lock, "")
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
        return self.root / WATCHES

    def protect(self, checkpoint: Path) -> None:
        # with the lock for deleting: prune must not delete it after it has looked for protections
        with locked_for_deletion(checkpoint.parent, patience=_PATIENCE):
            record_protected_name(self.lock, checkpoint.name)

    def unprotect(self) -> None:
        record_protected_name(self.lock, "")

    def now_ns(self) -> int:
        with translate_os_errors(self.root):
            os.utime(self.lock)  # by the clock of the run's file system, which may differ from the local one
            return os.fstat(self.lock).st_mtime_ns

    def require_unmoved_run(self) -> None:
        require_unmoved_run(self.lock, self.root, self.key)


def require_unmoved_run(lock_descriptor: int, root: Path, key: str) -> None:
    """Raise `NotACheckpoint` if the run of the watch `key` was moved or deleted."""
    with translate_os_errors(root):
        is_there = is_same_file(lock_descriptor, lock_file_of(root, key))
    if not is_there:
        hint = "the run was moved or deleted while it was watched; its journal lists what was done"
        raise NotACheckpoint("the run is gone", path=root, hint=hint)


def lock_file_of(root: Path, key: str) -> Path:
    return root / WATCHES / f"{key}{_LOCK}"


def is_handled_by_watch(checkpoint: Path) -> bool:
    folder = checkpoint.parent / WATCHES
    with translate_os_errors(folder):
        locks = [path for path in list_children(folder) if path.suffix == _LOCK] if folder.is_dir() else []
    for path in locks:
        with translate_os_errors(path):
            is_watching = is_locked(path)
        with suppress(Corrupt):  # the owner removed it after the check above
            if is_watching and read_small(path, _LIMIT) == os.fsencode(checkpoint.name):
                return True
    return False


def record_protected_name(lock_descriptor: int, name: str) -> None:
    """Write the name of the protected checkpoint into a lock file, "" for none."""
    os.ftruncate(lock_descriptor, 0)
    os.pwrite(lock_descriptor, os.fsencode(name), 0)
