"""Locks: on files, for as long as a process lives and has them open. Know nothing of what they are for."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from ckptkit.errors import Occupied

_PAUSE = 0.05  # seconds between two attempts
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def acquire(path: Path, *, patience: float = 0) -> int:
    """A lock on file `path`, which its owner removes when done; `Occupied` if it is not free within `patience` s."""
    last = time.monotonic() + patience
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if not try_lock(lock):
            os.close(lock)
            if time.monotonic() >= last:
                raise Occupied("another run is writing this destination", path=path, hint="wait for it to end")
            time.sleep(_PAUSE)
        elif is_same_file(lock, path):
            return lock
        else:
            os.close(lock)  # its owner removed it between our two calls


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file for as long as it stays open; False if somebody has a lock on it that forbids this."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: all are free there
        if error.errno not in _WITHOUT_LOCKS:
            os.close(fd)
            raise
    return True


def is_same_file(fd: int, path: Path) -> bool:
    """True if `path` still is the file open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def close(fd: int | None) -> None:
    """Close a descriptor, if there is one."""
    if fd is not None:
        with suppress(OSError):
            os.close(fd)
