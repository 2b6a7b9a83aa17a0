"""Open, read and list files, local or remote, that a stranger may have named."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

from ckptkit.errors import CkptError, Corrupt, IOFailure, NotACheckpoint, Occupied, Unsafe, translate_os_errors
from ckptkit.io.disk import again
from ckptkit.io.joined import JoinedPath, roots_of
from ckptkit.io.local import open_regular, open_to_write
from ckptkit.io.path import hint_on_id, is_remote
from ckptkit.io.ranges import RemoteFile
from ckptkit.io.stores import StoredSum

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_AHEAD = 1 << 12  # bytes that a small read of those in order brings at least
_COMPARED_AT_ONCE = 1 << 20  # bytes
_COMPARED: set[tuple[tuple[int, ...], ...]] = set()  # pairs of files that are the same, as they were then


class File(Protocol):
    """A regular file, open, wherever it lies."""

    @property
    def path(self) -> Path:
        """Return where it lies."""

    @property
    def size(self) -> int:
        """Return its bytes."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`. Raises `Corrupt` if the file ends before."""

    def write_at(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at byte `offset`. Raises `Unsupported` for a remote file."""

    def announce_order(self, *, in_order: bool) -> None:
        """Say that the file will be read from start to end, or here and there."""

    def close(self) -> None:
        """Close it."""


def open_file(path: Path, *, writable: bool = False) -> File:
    """Open the regular file `path`, which is there, to be read or, if it is local, to be written.

    Raises `Corrupt` if it is missing, `Unsafe` for links, devices, pipes and directories, `IOFailure` for all else.
    """
    if isinstance(path, JoinedPath):
        return open_file(the_one(path))
    if is_remote(path):
        if not path.is_absolute():
            return RemoteFile(path)
        path = Path(*path.parts)  # a temporary file of ours, beside what a store has
    return open_to_write(path) if writable else open_regular(path)


def the_one(path: JoinedPath) -> Path:
    """Return where a file lies that is in one of several directories, or the same in all that have it.

    Raises `Corrupt` if it is not.
    """
    first, *others = path.places or [path.place]
    for other in others:
        require_same(first, other)
    return first


def require_same(one: Path, other: Path) -> None:
    """Raise `Corrupt` unless two files have the same bytes; those that have been compared are not read again."""
    with translate_os_errors(other):
        stamps = [
            (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) for found in (one.stat(), other.stat())
        ]
    if tuple(stamps) in _COMPARED:
        return
    with opening(one) as ours, opening(other) as theirs:
        size, more = ours.size, theirs.size
        pieces = ((min(_COMPARED_AT_ONCE, size - at), at) for at in range(0, size, _COMPARED_AT_ONCE))
        if size != more or any(read_at(ours, *piece) != read_at(theirs, *piece) for piece in pieces):
            how = f"{size} bytes here, {more} there" if size != more else "other bytes"
            hint = "pass directories of one checkpoint only: these are of two saves, or one is an older copy"
            raise Corrupt(f"the file of this name in {other.parent} differs: {how}", path=one, hint=hint)
    _COMPARED.add(tuple(stamps))


@contextmanager
def opening(path: Path) -> Iterator[File]:
    """Open the regular file `path`, local or remote, to be read inside the block."""
    file = open_file(path)
    with translate_os_errors(path):
        try:
            yield file
        finally:
            file.close()


def read_at(file: File, length: int, offset: int) -> bytes:
    """Return exactly `length` bytes from byte `offset`. Raises `Corrupt` if there are fewer."""
    buffer = bytearray(length)
    file.read_into(memoryview(buffer), offset)
    return bytes(buffer)


def read_small(path: Path, limit: int) -> bytes:
    """Return all of a file that is not supposed to be large. Raises `Corrupt` if it has more than `limit` bytes."""
    with opening(path) as file:
        size = file.size
        if size > limit:
            raise Corrupt(f"expected at most {limit} bytes, found {size}", path=path)
        return read_at(file, size, 0)


def file_size(path: Path) -> int:
    """Return the bytes in the regular file `path`. Raises what `open_file` does for anything else."""
    if isinstance(path, JoinedPath):
        return file_size(the_one(path))
    with translate_os_errors(path), suppress(FileNotFoundError, ValueError):
        status = again(path.lstat)  # of thousands of files none needs to be opened
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    with opening(path) as file:
        return file.size


def stored_sum(path: Path) -> StoredSum | None:
    """Return what the store of a remote file knows of its content; None if it keeps no checksums, or for a local file.

    Reads no byte of the file.
    """
    if isinstance(path, JoinedPath):
        return stored_sum(the_one(path))
    with translate_os_errors(path):
        return path.stored_sum() if is_remote(path) else None


def names_in(path: Path) -> list[str]:
    """Return the names of what lies in directory `path`, in no order."""
    if isinstance(path, JoinedPath):
        return list(dict.fromkeys(name for place in path.places or [path.place] for name in names_in(place)))
    if is_remote(path):
        return again(lambda: [found.name for found in path.iterdir()])
    return again(lambda: os.listdir(path))  # of thousands of names none is made a path


def is_there(path: Path) -> bool:
    """Return True if anything of this name is there, be it a link to nothing. Raises `IOFailure` if none can tell."""
    with translate_os_errors(path):
        try:
            again(path.lstat)  # `os.path.lexists` takes any error for absence
        except ValueError:  # no file can have such a name
            return False
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise
    return True


def check_name(name: str, root: Path) -> None:
    """Raise `Unsafe` unless `name`, found in a checkpoint at `root`, is the plain name of a file in it."""
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise Unsafe(f"the checkpoint refers to `{name!a}`, which is not a plain file name", path=root)


class OpenFiles:
    """Files of directory `root`, open as long as they are in use: the least recently used is closed for the next.

    There are at most `limit`, or as many as the system allows. The kernel is told if they are read from start to end,
    `in_order`, and reads further ahead; or if not, and reads only what it is asked for. Not shared between threads.
    """

    __slots__ = ("_files", "_in_order", "_limit", "_root", "_writable")

    def __init__(self, root: Path, *, writable: bool = False, in_order: bool | None = None, limit: int = 64) -> None:
        self._root = root
        self._writable = writable
        self._in_order = in_order
        self._limit = limit
        self._files: OrderedDict[str, File] = OrderedDict()

    def __getitem__(self, name: str) -> File:
        """Return file `name`, to read from or to write to."""
        file = self._files.get(name)
        if file is None:
            while len(self._files) >= self._limit:
                self._close_oldest()
            file = self._files[name] = self._open(self._root / name)
        else:
            self._files.move_to_end(name)
        return file

    def _open(self, path: Path) -> File:
        while True:
            try:
                file = open_file(path, writable=self._writable)
            except IOFailure as error:
                if not (self._files and isinstance(error.__cause__, OSError) and error.__cause__.errno in _TOO_MANY):
                    raise
                self._close_oldest()
            else:
                if self._in_order is not None:
                    file.announce_order(in_order=self._in_order)
                return file

    def _close_oldest(self) -> None:
        self._files.popitem(last=False)[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; an error of one is raised when all are closed."""
        with ExitStack() as closing:
            for _ in self._files:
                closing.callback(self._close_oldest)


class ReadAhead:
    """The bytes that the last read of `files` brought, out of which the next is answered if it can be."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._name = ""
        self._size = 0
        self._start = 0
        self._window = bytearray()

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `offset` of file `name`. Raises `Corrupt` if there are fewer."""
        window, at = self.hold(name, offset, length)
        return bytes(window[at : at + length])

    def hold(self, name: str, offset: int, length: int) -> tuple[bytearray, int]:
        """Return bytes of a file, and where among them those of `read` are. Raises `Corrupt` if there are fewer."""
        at = offset - self._start
        if name == self._name and 0 <= at <= len(self._window) - length:
            return self._window, at
        file = self._files[name]
        if name != self._name:
            self._name, self._size = name, file.size
        self._window = bytearray()  # nothing, if the read fails
        window = bytearray(max(length, min(_AHEAD, self._size - offset)))
        file.read_into(memoryview(window), offset)
        self._start, self._window = offset, window
        return window, 0

    def inside(self, name: str, start: int, length: int) -> Callable[[int, int], bytes]:
        """Return a function that reads in the `length` bytes from `start` of a file, and nowhere else."""

        def read(offset: int, count: int) -> bytes:
            if offset < 0 or count < 0 or offset + count > length:
                raise Corrupt(f"expected an item of at least {offset + count} bytes, found {length}")
            return self.read(name, start + offset, count)

        return read


def recognize(head: bytes) -> str | None:
    """Return a hint on what a file really is whose first bytes, `head`, are not what they should be."""
    if head.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file itself: run `git lfs pull`"
    if head and not any(head):
        return "the file starts with zeros: it was allocated but never written, as after a crash or on a bad mount"
    return None


def children(path: Path) -> list[Path]:
    """Return everything that lies in a directory, by name."""
    with translate_os_errors(path):
        return [path / name for name in sorted(names_in(path))]


def absent(path: Path) -> NotACheckpoint:
    """Return the error for a path that does not exist; the hint has the nearest names beside it, or the Hub's URL."""
    from difflib import get_close_matches

    names: list[str] = []
    with suppress(CkptError):
        names = [child.name for child in children(path.parent) if not child.name.startswith(".")]
    near = " or ".join(f"`{path.parent / name}`" for name in get_close_matches(path.name, names))
    hint = f"did you mean {near}?" if near else hint_on_id(str(path))
    return NotACheckpoint("no such file or directory", path=path, hint=hint)


def destination_exists(path: Path) -> Occupied:
    """Return the error for a destination that is not empty."""
    return Occupied("the destination exists", path=path, hint="choose another, or replace it with --overwrite")


def folders(path: Path) -> list[Path]:
    """Return the directories in a directory, and links to some, by name."""
    with translate_os_errors(path):
        return [child for child in children(path) if child.is_dir()]


def entry_of(root: Path, target: str) -> str | None:
    """Return the entry of directory `root` that a link in it leads to or into, None if it leads elsewhere."""
    there = next(iter(roots_of(root)), root).absolute()
    place = Path(os.path.normpath(there / target))
    return place.relative_to(there).parts[0] if there in place.parents else None
