"""Create, sync, move and remove files and directories on a disk; retry system calls that a signal interrupts.

Python retries the calls that POSIX allows to be interrupted (PEP 475). Network and FUSE file systems interrupt others,
too. An output moves to its destination from a hidden sibling, atomically if the system can do that.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from ckptkit.errors import IOFailure, Occupied, translate_os_errors, warn

HIDDEN_SIBLING = re.compile(r"\.(.+)\.ckptkit\.(?:tmp|old|lock)", re.DOTALL)  # hidden siblings of a destination
UNSUPPORTED_CALL = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # the file system lacks the call
_ENOUGH = 1 << 26  # bytes written between two early syncs
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_AT_FDCWD = -100

P = ParamSpec("P")
T = TypeVar("T")


class DurabilityWarning(UserWarning):
    """The file system lacks a call that a guarantee of ckptkit depends on."""


def warn_of_lost_guarantee(path: Path, reason: str) -> None:
    warn(f"{path}: {reason}", DurabilityWarning)


def retry_interrupted(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `call`, retrying as long as a signal interrupts it."""
    while True:
        with suppress(InterruptedError):
            return call(*args, **kwargs)


def close_descriptor(fd: int) -> None:
    """Close a descriptor.

    Never retries: after an interrupted close, the number may already belong to another thread.
    """
    with suppress(InterruptedError):
        os.close(fd)


def make_directories(path: Path, *, sync: bool) -> None:
    """Create a directory and its parents; with `sync`, they survive a power failure."""
    if not path.exists():
        if path.is_symlink():
            hint = f"create {path.readlink()}, or remove the link"
            raise IOFailure("the symbolic link points to a missing directory", path=path, hint=hint)
        make_directories(path.parent, sync=sync)
        retry_interrupted(path.mkdir, exist_ok=True)
        if sync:
            sync_path(path.parent)


def remove_path(path: Path) -> None:
    """Remove a file, or a directory with its contents, if it exists; a link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        for inside in list(path.iterdir()):
            remove_path(inside)
        retry_interrupted(path.rmdir)
    else:
        retry_interrupted(path.unlink, missing_ok=True)


def sync_directory_tree(root: Path) -> None:
    """Flush every file and directory below `root`, and `root` itself, to the disk."""
    for directory, _, files in os.walk(root, topdown=False, onerror=raise_walk_error):
        for name in files:
            sync_path(Path(directory, name))
        sync_path(Path(directory))


def raise_walk_error(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` ignores by default."""
    raise error


def sync_path(path: Path) -> None:
    """Flush one file or directory to the disk; only warns if the file system cannot sync directories."""
    with translate_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if not (path.is_dir() and error.errno in UNSUPPORTED_CALL):
                raise IOFailure(f"fsync failed: {(error.strerror or '').lower()}", path=path) from error
            warn_of_lost_guarantee(path, "this file system cannot sync directories: a power cut may undo the change")
        finally:
            close_descriptor(fd)


@contextmanager
def sync_in_background(root: Path, *, sync: bool) -> Iterator[Callable[[str, int], None]]:
    """Yield a function to call, from one thread at a time, with a file's name and the bytes just written to it.

    Another thread flushes these files to the disk meanwhile. This guarantees nothing: the final `sync_directory_tree`
    does. Raises `IOFailure` at the end if a sync failed, because the next sync of the same file would not report it
    again. Does nothing without `sync`.
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
                # `tell` may add files meanwhile: they wait for the next round
                for _ in range(len(written)):
                    sync_path(root / written.pop())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                errors.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    if sync:
        with suppress(RuntimeError):  # no thread available: the final sync does all of the work
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


def staging_path(dst: Path) -> Path:
    """Return the hidden sibling in which `dst` is written.

    Its name is fixed, so a later run finds an interrupted one.
    """
    return dst.parent / f".{dst.name}.ckptkit.tmp"


def old_destination_path(dst: Path) -> Path:
    """Return the hidden sibling that the old `dst` becomes while directories are swapped in steps."""
    return dst.parent / f".{dst.name}.ckptkit.old"


def lock_path(dst: Path) -> Path:
    """Return the hidden sibling that the writer of `dst` keeps locked."""
    return dst.parent / f".{dst.name}.ckptkit.lock"


def move_file_into_place(path: Path, dst: Path, overwrite: bool) -> None:
    """Rename file `path` to `dst`. Raises `Occupied` if `dst` exists, unless `overwrite`."""
    if overwrite:
        retry_interrupted(os.replace, path, dst)
        return
    try:
        retry_interrupted(os.link, path, dst)
    except FileExistsError as error:
        raise Occupied("another process created the destination meanwhile", path=dst) from error


def move_directory_into_place(path: Path, dst: Path, overwrite: bool) -> None:
    """Rename directory `path` to `dst`. The old directory, if any, is at `path` afterwards."""
    if not overwrite or not dst.exists() or not any(dst.iterdir()):
        try:
            retry_interrupted(os.rename, path, dst)  # replaces nothing but an empty directory
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise Occupied("another process created the destination meanwhile", path=dst) from error
        return
    if swap_directories(path, dst):
        return
    message = "this file system cannot swap directories in one step: for a moment the destination is absent"
    warn_of_lost_guarantee(dst, message)
    aside = old_destination_path(dst)
    retry_interrupted(os.rename, dst, aside)
    try:
        retry_interrupted(os.rename, path, dst)
    except OSError:
        retry_interrupted(os.rename, aside, dst)  # after a crash, the next run does this
        raise
    retry_interrupted(os.rename, aside, path)


def swap_directories(a: Path, b: Path) -> bool:
    """Swap two directories atomically. Returns False if the system cannot."""
    import ctypes  # deferred: slow to import, and rarely needed

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    while libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in UNSUPPORTED_CALL:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), str(b))
    return True
