"""Lock files for as long as a process lives and has them open."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from ckptkit.errors import Occupied
from ckptkit.io.disk import UNSUPPORTED_CALL, retry_interrupted, warn_of_lost_guarantee

_PAUSE = 0.05  # seconds between two attempts
_NO_LOCKS_ERRORS = (*UNSUPPORTED_CALL, errno.ENOLCK)


def acquire_lock(path: Path, *, timeout: float = 0) -> int:
    """Lock file `path`, which `release_lock` removes. Raises `Occupied` if it stays locked for `timeout` seconds."""
    last = time.monotonic() + timeout
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            is_free = try_lock(lock, path)
            if is_free and is_same_file(lock, path):
                return lock
        except BaseException:
            close_if_open(lock)
            raise
        close_if_open(lock)  # another process has the lock, or removed the file between our two calls
        if not is_free:
            if time.monotonic() >= last:
                raise Occupied("another run is writing this destination", path=path, hint="wait for it to end")
            time.sleep(_PAUSE)


def try_lock(fd: int, path: Path, *, shared: bool = False) -> bool:
    """Lock the file open as `fd` until it is closed. Returns False if another process has a conflicting lock.

    If the file system has no locks, warns and returns True.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_ERRORS:
            raise
        warn_of_lost_guarantee(
            path, "this file system cannot lock files: two commands that write here would not see each other"
        )
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file; False if the file does not exist."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(lock, path)
    finally:
        close_if_open(lock)


def is_same_file(fd: int, path: Path) -> bool:
    """Return whether the file at `path` is still the one that is open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def release_lock(fd: int, path: Path) -> None:
    """Remove a lock file and unlock it. If it cannot be removed, its next owner will do that.

    If somebody deleted the file, another lock may lie at its path: that one stays.
    """
    with suppress(OSError):
        if is_same_file(fd, path):
            retry_interrupted(path.unlink)
    close_if_open(fd)


def close_if_open(fd: int | None) -> None:
    if fd is not None:
        with suppress(OSError):
            os.close(fd)
