"""Staging: output is made in a hidden directory beside its destination and renamed into place when whole.

At every moment the destination is absent, old and whole, or new and whole. Knows files and renames; no tensor.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from ckptkit.errors import IOFailure, NoRoom, Occupied, Unsafe, translate_os_errors
from ckptkit.files import Opened, write_from

_RENAME_EXCHANGE = 2  # <linux/fs.h>
_AT_FDCWD = -100
WORK = ".ckptkit-work"
_KEY = "key"
_PATIENCE = 60.0  # seconds that a part waits for others to open the same destination
_PAUSE = 0.05
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def staging_path(dst: Path) -> Path:
    """The hidden sibling in which `dst` is made; one name, so that a later run finds what a dead one left."""
    return dst.parent / f".{dst.name}.ckptkit.tmp"


def lock_path(dst: Path) -> Path:
    """The hidden sibling that whoever makes `dst` holds a lock on."""
    return dst.parent / f".{dst.name}.ckptkit.lock"


class Stage:
    """An output directory in the making: `open` it, write into `path`, then `commit` or `discard`.

    Holds a lock beside the destination from one to the other: a second run on the same destination is `Occupied`
    while the first is alive, and clears its leavings away when it is not.

    With a `key`, which says what is being made, a directory that was begun under the same key is gone on with, and
    `leave` leaves one for later. Several processes that are each to make a `part` have it open at the same time.
    """

    def __init__(
        self, dst: Path, *, overwrite: bool = False, sync: bool = True, key: bytes | None = None, is_part: bool = False
    ) -> None:
        self.dst = dst.absolute()
        self.path = staging_path(self.dst)
        self.overwrite = overwrite
        self.sync = sync
        self.key = key
        self.is_part = is_part
        self._lock: int | None = None
        self._claim: int | None = None  # on what is being made under a key; shared among parts
        self._is_ours = False  # what lies in `path`

    @property
    def work(self) -> Path:
        """A directory in `path` for notes on what has been done; it is not part of the output."""
        return self.path / WORK

    def open(self) -> Self:
        """Lock the destination and make `path`, empty unless there is something to go on with.

        Apart from `__init__`, so that there is something to discard whenever a signal comes.
        """
        check_destination(self.dst, self.overwrite)
        with translate_os_errors(self.dst):
            self.dst.parent.mkdir(parents=True, exist_ok=True)
            self._lock = acquire(lock_path(self.dst), patience=_PATIENCE if self.is_part else 0)
            check_destination(self.dst, self.overwrite)  # a run before us may just have made it
            if self.key is None or read_key(self.path) != self.key:
                close(claim(self.path))
                self._is_ours = True
                make_empty(self.path)
                if self.key is not None:
                    write_key(self.path, self.key)
            if self.key is not None:
                self._claim = claim(self.path, shared=self.is_part)
            self._is_ours = True
            if self.is_part:
                self._release()
        return self

    def commit(self) -> None:
        """Make the destination what `path` holds, durably. A failed fsync is never tried again."""
        with translate_os_errors(self.path):
            shutil.rmtree(self.work, ignore_errors=True)
            if self.sync:
                sync_tree(self.path)
            replaced = move_into_place(self.path, self.dst, self.overwrite)
            if self.sync:
                sync_path(self.dst.parent)
        if replaced:  # `path` is now what was there before; should it not go away, the next run removes it
            shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def discard(self) -> None:
        """Remove what was made, if anything was. The destination is as it was."""
        if self._is_ours and self._lock is not None and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """Let go of what was made, for others to go on with."""
        claimed, self._claim = self._claim, None
        close(claimed)
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                lock_path(self.dst).unlink()
            close(lock)


@contextmanager
def staging(dst: Path, *, overwrite: bool = False, sync: bool = True) -> Iterator[Path]:
    """A directory to write into, which becomes `dst` when the block ends well and vanishes when it does not."""
    stage = Stage(dst, overwrite=overwrite, sync=sync)
    try:
        yield stage.open().path
        stage.commit()
    except BaseException:
        stage.discard()
        raise


def check_destination(dst: Path, overwrite: bool) -> None:
    """Raise `Occupied` if something is at `dst` that may not be replaced; an empty directory may."""
    if dst.is_symlink():
        raise Unsafe("the destination is a symbolic link", path=dst, hint="name the directory that it points to")
    if dst.exists() and not dst.is_dir():
        raise Occupied("the destination is a file", path=dst)
    with translate_os_errors(dst):
        if dst.is_dir() and any(dst.iterdir()) and not overwrite:
            raise Occupied("the destination exists", path=dst, hint="choose another, or replace it with --overwrite")


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
    except OSError as error:  # a file system without locks: `make_empty` still refuses what is not ours
        if error.errno not in (*_NOT_HERE, errno.ENOLCK):
            os.close(fd)
            raise
    return True


def claim(path: Path, *, shared: bool = False) -> int | None:
    """A lock on what is being made in directory `path`, None if nothing is that others may go on with."""
    try:
        fd = os.open(path / WORK / _KEY, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    if not try_lock(fd, shared=shared):
        os.close(fd)
        hint = "wait for them to end"
        raise Occupied("parts of this destination, or of another one, are still being made", path=path, hint=hint)
    return fd


def close(fd: int | None) -> None:
    """Close a descriptor, if there is one."""
    if fd is not None:
        with suppress(OSError):
            os.close(fd)


def read_key(path: Path) -> bytes | None:
    """The key under which directory `path` was begun; None if there is no such directory, or it has none."""
    file = path / WORK / _KEY
    if path.is_symlink() or not file.is_file():
        return None
    with translate_os_errors(file):
        return file.read_bytes()


def write_key(path: Path, key: bytes) -> None:
    """Begin directory `path` under a key; whoever reads one reads all of it."""
    (path / WORK).mkdir()
    written = path / WORK / f"{_KEY}.new"
    written.write_bytes(key)
    written.rename(path / WORK / _KEY)


def make_empty(path: Path) -> None:
    """Make directory `path`, in the place of what a dead run left there."""
    if path.is_symlink():
        raise Unsafe("a symbolic link lies where the output is to be made", path=path, hint="remove it")
    with translate_os_errors(path):
        if path.exists():
            remove(path)
        path.mkdir()


def is_same_file(fd: int, path: Path) -> bool:
    """True if `path` still is the file open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Remove a file or a directory with all it holds; a link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def move_into_place(path: Path, dst: Path, overwrite: bool) -> bool:
    """Rename directory `path` to `dst`. True if something was there before, which now is at `path`."""
    if not overwrite or not dst.exists() or not any(dst.iterdir()):
        try:
            os.rename(path, dst)  # replaces nothing but an empty directory
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise Occupied("the destination came into being meanwhile", path=dst) from error
        return False
    exchange(path, dst)
    return True


def exchange(a: Path, b: Path) -> None:
    """Swap two directories in one step; where the system cannot, in three, between which `b` is absent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NOT_HERE:
            raise OSError(code, os.strerror(code), str(b))
    aside = a.with_suffix(".old")
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)


def sync_tree(root: Path) -> None:
    """Force every file and directory below `root`, and `root` itself, to the disk."""
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            sync_path(Path(directory, name))
        sync_path(Path(directory))


def sync_path(path: Path) -> None:
    """Force one file or directory to the disk; file systems that cannot sync a directory are let off."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NOT_HERE):
            raise IOFailure(f"fsync failed: {(error.strerror or '').lower()}", path=path) from error
    finally:
        os.close(fd)


def check_room(path: Path, nbytes: int) -> None:
    """Raise `NoRoom` if the file system of `path` (or of its nearest parent) has fewer than `nbytes` bytes free."""
    free = free_bytes(path)
    if free < nbytes:
        raise NoRoom(
            f"{nbytes} bytes are needed and {free} are free", path=path, hint="free some space, or write elsewhere"
        )


def missing_bytes(root: Path, sizes: Mapping[str, int]) -> int:
    """Bytes that files of these sizes still need on the disk, by their names in directory `root`."""
    missing = 0
    for name, nbytes in sizes.items():
        try:
            reserved = 512 * (root / name).stat().st_blocks
        except OSError:
            reserved = 0
        missing += max(0, nbytes - reserved)
    return missing


def free_bytes(path: Path) -> int:
    """Bytes free for us on the file system that `path` is or will be on."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    with translate_os_errors(path):
        return shutil.disk_usage(there).free


def create_file(path: Path, size: int, parts: Iterable[tuple[int, bytes]], *, anew: bool = True) -> None:
    """Create a file of `size` bytes with `parts` at their offsets; the disk's room for the rest is reserved only.

    With `anew` false it may be there already, from an earlier attempt, with whatever lies between the parts.
    """
    with translate_os_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if anew else 0) | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, 0)
                reserve(fd, size)
            for offset, content in parts:
                write_from(fd, memoryview(content), offset, path)
        finally:
            os.close(fd)


def write_parts(root: Path, parts: Iterable[tuple[str, tuple[int, bytes]]]) -> None:
    """Write parts, each the name of a file that is there, an offset and bytes; file by file."""
    with Opened(root, writable=True) as files:
        for name, (offset, content) in sorted(parts):
            write_from(files.fd(name), memoryview(content), offset, root / name)


def reserve(fd: int, size: int) -> None:
    """Give an empty file its size, and its blocks where the file system can: running out of disk then shows at once."""
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NOT_HERE:
            raise
        os.ftruncate(fd, size)
