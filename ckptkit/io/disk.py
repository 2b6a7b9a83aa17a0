"""Make, sync and remove files and directories on a disk; repeat system calls that a signal interrupts.

Python repeats the calls that POSIX says can be interrupted (PEP 475). Network and user-space file systems interrupt
others too.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from ckptkit.errors import IOFailure, translate_os_errors

NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # what is asked for is lacking

P = ParamSpec("P")
T = TypeVar("T")


class PromiseLost(UserWarning):
    """A promise that cannot be kept on this file system, which lacks the call that it takes."""


def warn_of_loss(path: Path, what: str) -> None:
    """Warn of the promise that is lost at `path`."""
    warnings.warn(f"{path}: {what}", PromiseLost, stacklevel=2)


def again(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `call` gives, which is made again as long as a signal interrupts it."""
    while True:
        with suppress(InterruptedError):
            return call(*args, **kwargs)


def close(fd: int) -> None:
    """Close a descriptor. One that was interrupted in closing is closed; by now it may be another thread's."""
    with suppress(InterruptedError):
        os.close(fd)


def make_directories(path: Path, *, sync: bool) -> None:
    """Make a directory, and the one that it is to be in; they outlive a power cut if `sync`."""
    if not path.exists():
        make_directories(path.parent, sync=sync)
        again(path.mkdir, exist_ok=True)
        if sync:
            sync_path(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a directory with all it holds, if there is one; a link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        for inside in list(path.iterdir()):
            remove(inside)
        again(path.rmdir)
    else:
        again(path.unlink, missing_ok=True)


def sync_tree(root: Path) -> None:
    """Force every file and directory below `root`, and `root` itself, to the disk."""
    for directory, _, files in os.walk(root, topdown=False, onerror=fail):
        for name in files:
            sync_path(Path(directory, name))
        sync_path(Path(directory))


def fail(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` by itself leaves out."""
    raise error


def sync_path(path: Path) -> None:
    """Force one file or directory to the disk; file systems that cannot sync a directory are let off."""
    with translate_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if not (path.is_dir() and error.errno in NOT_HERE):
                raise IOFailure(f"fsync failed: {(error.strerror or '').lower()}", path=path) from error
            warn_of_loss(path, "this file system cannot sync directories: a power cut may undo the change")
        finally:
            close(fd)


_ENOUGH = 1 << 26  # bytes that are worth a sync


@contextmanager
def early_sync(root: Path, *, sync: bool) -> Iterator[Callable[[str, int], None]]:
    """Give a function that is told, by one thread at a time, how many bytes were written to which file in `root`.

    Another thread forces these files to the disk meanwhile. That promises nothing yet: what is written last is left to
    the sync of all. Raises `IOFailure` at the end if it failed, since the next sync would not fail again. Without
    `sync` nothing is done.
    """
    written: set[str] = set()
    waiting = 0
    is_due, is_over = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def tell(path: str, nbytes: int) -> None:
        nonlocal waiting
        written.add(path)
        waiting += nbytes
        if waiting >= _ENOUGH:
            waiting = 0
            is_due.set()

    def run() -> None:
        while is_due.wait() and not is_over.is_set():
            is_due.clear()
            try:
                for _ in range(len(written)):
                    sync_path(root / written.pop())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                errors.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    if sync:
        with suppress(RuntimeError):  # the system has no more threads: all is left to the end
            thread.start()
    try:
        yield tell
    finally:
        is_over.set()
        is_due.set()
        if thread.is_alive():
            thread.join()
    if errors:
        raise errors[0]
