"""Files: opening and reading what a stranger named, safely. Knows offsets and lengths; no tensor, no format."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from ckptkit.errors import Corrupt, IOFailure, Unsafe, translate_os_errors
from ckptkit.files.path import RemotePath
from ckptkit.files.ranges import RemoteFile
from ckptkit.files.system import again, close

Handle = int | RemoteFile  # what is read from: the descriptor of a local file, or a remote one

# Larger writes make the kernel look for large free pages, which virtual machines first have to get from their host:
# measured in one, 1.6 GB took 0.6 s in writes of 64 KiB and 2 s in writes of 4 MiB.
_WRITE_BYTES = 1 << 16
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def check_name(name: str, root: Path) -> None:
    """Raise `Unsafe` unless `name`, found in a checkpoint at `root`, is the plain name of a file in it."""
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise Unsafe(f"the checkpoint refers to `{name!a}`, which is not a plain file name", path=root)


def open_regular(path: Path) -> int:
    """A descriptor to read the regular file `path`; links, devices, pipes and directories are `Unsafe`."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except FileNotFoundError as error:
        raise Corrupt("the file is missing", path=path, hint="a shard was lost or never copied here") from error
    except ValueError as error:
        raise Unsafe(f"{path.name!a} cannot be a file's name", path=path.parent) from error
    except OSError as error:
        if error.errno == errno.ELOOP:  # what O_NOFOLLOW makes of a link
            hint = "copy the file itself into the checkpoint"
            raise Unsafe("the file is a symbolic link", path=path, hint=hint) from error
        raise IOFailure((error.strerror or str(error)).lower(), path=path) from error
    with translate_os_errors(path), ExitStack() as undo:
        undo.callback(close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Unsafe("not a regular file", path=path)
        undo.pop_all()
    return fd


def names_in(path: Path) -> list[str]:
    """The names of what lies in a directory."""
    return [found.name for found in path.iterdir()] if isinstance(path, RemotePath) else again(os.listdir, path)


def is_there(path: Path) -> bool:
    """True if anything of this name is there, be it a link to nothing. Raises `IOFailure` if that cannot be told."""
    if isinstance(path, RemotePath):
        return path.exists()
    with translate_os_errors(path):
        try:
            again(os.lstat, path)  # `os.path.lexists` takes any error for absence
        except ValueError:  # no file can have such a name
            return False
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise
    return True


@contextmanager
def opening(path: Path) -> Iterator[tuple[Handle, int]]:
    """The regular file `path`, local or remote, to read from, and its size in bytes."""
    if isinstance(path, RemotePath):
        file = RemoteFile(path)
        yield file, file.size
        return
    fd = open_regular(path)
    with translate_os_errors(path):
        try:
            yield fd, os.fstat(fd).st_size
        finally:
            close(fd)


def file_size(path: Path) -> int:
    """Bytes in the regular file `path`."""
    with opening(path) as (_, size):
        return size


def read_small(path: Path, limit: int) -> bytes:
    """The whole of a file that is not supposed to be large; more than `limit` bytes is `Corrupt`."""
    with opening(path) as (fd, size):
        if size > limit:
            raise Corrupt(f"{size} bytes, more than the {limit} such a file may have", path=path)
        return read_at(fd, size, 0, path)


def read_at(fd: Handle, length: int, offset: int, path: Path) -> bytes:
    """Exactly `length` bytes at `offset`; fewer is `Corrupt`."""
    buffer = bytearray(length)
    read_into(fd, memoryview(buffer), offset, path)
    return bytes(buffer)


def read_into(fd: Handle, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from `offset`; a file that ends before is `Corrupt`."""
    if isinstance(fd, RemoteFile):
        fd.read_into(buffer, offset)
        return
    done = 0
    with translate_os_errors(path):
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                end = os.fstat(fd).st_size
                raise Corrupt(f"the file ends at byte {end}, but {offset + len(buffer)} are needed", path=path)
            done += count


def write_from(fd: Handle, buffer: memoryview, offset: int, path: Path) -> None:
    """Write the whole of `buffer` at `offset`."""
    assert isinstance(fd, int), "remote files are not opened to be written"
    done = 0
    with translate_os_errors(path):
        while done < len(buffer):
            done += os.pwrite(fd, buffer[done : done + _WRITE_BYTES], offset + done)


class Opened:
    """Files of one directory, open as long as they are in use: the least recently used is closed for the next.

    There are at most `limit`, or as many as the system allows. With `in_order` the kernel is told that they are read
    from start to end, and reads further ahead. Not shared between threads.
    """

    __slots__ = ("_fds", "_in_order", "_limit", "_root", "_writable")

    def __init__(self, root: Path, *, writable: bool = False, in_order: bool = False, limit: int = 64) -> None:
        self._root = root
        self._writable = writable
        self._in_order = in_order
        self._limit = limit
        self._fds: OrderedDict[str, Handle] = OrderedDict()

    def fd(self, name: str) -> Handle:
        """File `name`, to read from or to write to."""
        fd = self._fds.get(name)
        if fd is None:
            while len(self._fds) >= self._limit:
                self._close_oldest()
            fd = self._fds[name] = self._open(self._root / name)
        else:
            self._fds.move_to_end(name)
        return fd

    def _open(self, path: Path) -> Handle:
        if isinstance(path, RemotePath) and not self._writable:
            return RemoteFile(path)
        while True:
            try:
                fd = open_to_write(path) if self._writable else open_regular(path)
            except IOFailure as error:
                if not (self._fds and isinstance(error.__cause__, OSError) and error.__cause__.errno in _TOO_MANY):
                    raise
                self._close_oldest()
            else:
                if self._in_order and hasattr(os, "posix_fadvise"):
                    with suppress(OSError):
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                return fd

    def _close_oldest(self) -> None:
        name, fd = self._fds.popitem(last=False)
        if isinstance(fd, RemoteFile):
            return
        with translate_os_errors(self._root / name):  # some file systems report a failed write only here
            close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; an error of one is raised when all are closed."""
        with ExitStack() as closing:
            for _ in self._fds:
                closing.callback(self._close_oldest)


def open_to_write(path: Path) -> int:
    """A descriptor to write to the file `path`, which is there."""
    with translate_os_errors(path):
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def recognise(head: bytes) -> str | None:
    """A hint on what a file really is whose first bytes are not what they should be."""
    if head.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file itself: run `git lfs pull`"
    if head and not any(head):
        return "the file starts with zeros: it was allocated but never written, as after a crash or on a bad mount"
    return None
