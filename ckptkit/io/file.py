"""Open, read and list files, local or remote, whose names may come from an untrusted source."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from ckptkit.errors import RESTORE, CkptError, Corrupt, IOFailure, NotACheckpoint, Occupied, Unsafe, translate_os_errors
from ckptkit.io.disk import retry_interrupted
from ckptkit.io.joined_path import JoinedPath, local_paths_of
from ckptkit.io.local_file import LocalFile, open_existing_for_writing, open_regular
from ckptkit.io.path import hint_for_hub_id, is_remote
from ckptkit.io.remote_file import RemoteFile
from ckptkit.io.stores import ChecksumStore, StoredSum, translate_store_errors

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_MIN_READ = 1 << 12  # minimum bytes per request of `ReadAhead`
_COMPARED_AT_ONCE = 1 << 20  # bytes per step, so that files of any size can be compared
# pairs of files known to be equal, by device, inode, size and mtime
_COMPARED: set[tuple[tuple[int, ...], ...]] = set()


File = LocalFile | RemoteFile  # an open regular file


def open_file(path: Path, *, writable: bool = False) -> File:
    """Open the existing regular file `path` for reading or, if it is local, for writing.

    Raises `Corrupt` if it is missing, `Unsafe` for links, devices, pipes and directories, `IOFailure` for any other
    error.
    """
    if isinstance(path, JoinedPath):
        return open_file(require_equal_copies(path))
    if is_remote(path):
        if not path.is_absolute():
            return RemoteFile(path)
        path = Path(*path.parts)  # a local temporary file with the unpacked bytes of a remote one
    return open_existing_for_writing(path) if writable else open_regular(path)


def require_equal_copies(path: JoinedPath) -> Path:
    """Return the path of a file in joined directories; several copies must be equal.

    Raises `Corrupt` if they are not.
    """
    first, *others = path.existing_paths or [path.first_existing_path]
    for other in others:
        with translate_os_errors(other):
            statuses = first.stat(), other.stat()
        stamps = tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in statuses)
        if stamps in _COMPARED:
            continue
        with opening(first) as ours, opening(other) as theirs:
            size, more = ours.size, theirs.size
            pieces = ((min(_COMPARED_AT_ONCE, size - at), at) for at in range(0, size, _COMPARED_AT_ONCE))
            if size != more or any(read_at(ours, *piece) != read_at(theirs, *piece) for piece in pieces):
                how = f"{size} bytes here, {more} there" if size != more else "other bytes"
                hint = "pass directories of one checkpoint only: these are of two saves, or one is an older copy"
                raise Corrupt(f"the file of this name in {other.parent} differs: {how}", path=first, hint=hint)
        _COMPARED.add(stamps)
    return first


@contextmanager
def opening(path: Path) -> Iterator[File]:
    """Open the regular file `path`, local or remote, for reading inside the block."""
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
    """Return the content of a small file. Raises `Corrupt` if it has more than `limit` bytes."""
    with opening(path) as file:
        size = file.size
        if size > limit:
            raise Corrupt(f"expected at most {limit} bytes, found {size}", path=path)
        return read_at(file, size, 0)


def file_size(path: Path) -> int:
    """Return the size of the regular file `path` in bytes. Raises the errors of `open_file` for any other path."""
    if isinstance(path, JoinedPath):
        return file_size(require_equal_copies(path))
    with translate_os_errors(path), suppress(FileNotFoundError, ValueError):
        status = retry_interrupted(path.lstat)  # faster than opening each of thousands of files
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    with opening(path) as file:
        return file.size


def find_stored_checksums(path: Path) -> StoredSum | None:
    """Return the checksums that a store has of a remote file; None without any, or for a local file.

    Reads no byte of the file.
    """
    if isinstance(path, JoinedPath):
        return find_stored_checksums(require_equal_copies(path))
    if not is_remote(path):
        return None
    with translate_os_errors(path):
        store = path.store.store
        if not isinstance(store, ChecksumStore):
            return None
        with translate_store_errors(path, store):
            return store.read_stored_checksums(path.key)


def names_in(path: Path) -> list[str]:
    """Return the names of the entries of directory `path`, in no order."""
    if isinstance(path, JoinedPath):
        return list(
            dict.fromkeys(
                name for directory in path.existing_paths or [path.first_existing_path] for name in names_in(directory)
            )
        )
    if is_remote(path):
        return retry_interrupted(lambda: [child.name for child in path.iterdir()])
    return retry_interrupted(lambda: os.listdir(path))  # faster than creating thousands of paths


def is_existing_path(path: Path) -> bool:
    """Return whether anything exists at a path, including a broken link. Raises `IOFailure` if that is unknown."""
    with translate_os_errors(path):
        try:
            retry_interrupted(path.lstat)  # unlike `os.path.lexists`, which treats every error as absence
        except ValueError:  # no file can have such a name, e.g. with a NUL
            return False
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise
    return True


def require_plain_file_name(name: str, checkpoint: Path) -> None:
    """Raise `Unsafe` unless `name`, found in a checkpoint at `checkpoint`, is a plain file name."""
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise Unsafe(f"the checkpoint refers to `{name!a}`, which is not a plain file name", path=checkpoint)


class OpenFiles:
    """Open files of directory `root`; the least recently used one is closed when the limit is reached.

    There are at most `limit`, or as many as the system allows. `in_order` tells the kernel whether files are read
    sequentially, for more readahead, or at random, for none. Not shared between threads.
    """

    __slots__ = ("_files", "_in_order", "_limit", "_root", "_writable")

    def __init__(self, root: Path, *, writable: bool = False, in_order: bool | None = None, limit: int = 64) -> None:
        self._root = root
        self._writable = writable
        self._in_order = in_order
        self._limit = limit
        self._files: OrderedDict[str, File] = OrderedDict()

    def __getitem__(self, name: str) -> File:
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
        """Close every file; an error is raised after all are closed."""
        with ExitStack() as closing:
            for _ in self._files:
                closing.callback(self._close_oldest)


class ReadAhead:
    """A read buffer over `files`: a small read also fetches the bytes behind it, which may serve the next read."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._name = ""
        self._size = 0
        self._start = 0
        self._window = bytearray()

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `offset` of file `name`. Raises `Corrupt` if there are fewer."""
        window, at = self.buffer_containing(name, offset, length)
        return bytes(window[at : at + length])

    def buffer_containing(self, name: str, offset: int, length: int) -> tuple[bytearray, int]:
        """Return the buffer that contains the bytes of `read`, and their offset in it.

        Raises `Corrupt` if there are fewer.
        """
        at = offset - self._start
        if name == self._name and 0 <= at <= len(self._window) - length:
            return self._window, at
        file = self._files[name]
        if name != self._name:
            self._name, self._size = name, file.size
        self._window = bytearray()  # stays empty if the read fails
        window = bytearray(max(length, min(_MIN_READ, self._size - offset)))
        file.read_into(memoryview(window), offset)
        self._start, self._window = offset, window
        return window, 0

    def reader_within(self, name: str, start: int, length: int) -> Callable[[int, int], bytes]:
        """Return a function that reads only in the `length` bytes from `start` of a file. Raises `Corrupt` outside."""

        def read(offset: int, count: int) -> bytes:
            if offset < 0 or count < 0 or offset + count > length:
                raise Corrupt(f"expected an item of at least {offset + count} bytes, found {length}")
            return self.read(name, start + offset, count)

        return read


def find_missing_content_error(head: bytes, path: Path | None = None) -> Corrupt | None:
    """Return the error for a file with unexpected first bytes `head`, if they show what happened; else None."""
    if head.startswith(b"version https://git-lfs"):
        message = "expected the file itself, found a Git LFS pointer to it"
        return Corrupt(message, path=path, hint="run `git lfs pull` in the repository that the file is in")
    if not head:
        return Corrupt("the file is empty", path=path, hint=RESTORE)
    if not any(head):
        message = "the file starts with zeros: it was allocated but never written, as after a crash or on a bad mount"
        return Corrupt(message, path=path, hint=RESTORE)
    return None


def list_children(path: Path) -> list[Path]:
    with translate_os_errors(path):
        return [path / name for name in sorted(names_in(path))]


def missing_path_error(path: Path) -> NotACheckpoint:
    """Return the error for a path that does not exist. The hint has similar names beside it, or the Hub's URL."""
    from difflib import get_close_matches

    names: list[str] = []
    with suppress(CkptError):
        names = [child.name for child in list_children(path.parent) if not child.name.startswith(".")]
    near = " or ".join(f"`{path.parent / name}`" for name in get_close_matches(path.name, names))
    hint = f"did you mean {near}?" if near else hint_for_hub_id(str(path))
    return NotACheckpoint("no such file or directory", path=path, hint=hint)


def require_kind_if_exists(dst: Path, *, is_file: bool) -> None:
    """Raise `Occupied` if a directory is at the destination of a file, or a file at the destination of a directory."""
    if dst.exists() and dst.is_dir() == is_file:
        hint = "choose another destination"
        raise Occupied(f"the destination is a {'directory' if is_file else 'file'}", path=dst, hint=hint)


def destination_exists_error(path: Path) -> Occupied:
    return Occupied("the destination exists", path=path, hint="choose another, or pass --overwrite to replace it")


def list_directories(path: Path) -> list[Path]:
    """Return the directories in a directory, including links to directories, sorted by name."""
    with translate_os_errors(path):
        return [child for child in list_children(path) if child.is_dir()]


def find_link_target_entry(root: Path, link_target: str) -> str | None:
    """Return the entry of directory `root` that a link in it leads to or into; None if it leads elsewhere."""
    absolute_root = next(iter(local_paths_of(root)), root).absolute()
    target_path = Path(os.path.normpath(absolute_root / link_target))
    return target_path.relative_to(absolute_root).parts[0] if absolute_root in target_path.parents else None
