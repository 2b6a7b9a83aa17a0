"""Create files with their final size and the bytes known beforehand, before any data is written."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptkit.errors import NoRoom, translate_os_errors
from ckptkit.io.disk import UNSUPPORTED_CALL, retry_interrupted
from ckptkit.io.file import OpenFiles
from ckptkit.io.local_file import LocalFile
from ckptkit.io.path import is_remote
from ckptkit.words import format_bytes


def require_free_space(path: Path, nbytes: int) -> None:
    """Raise `NoRoom` if the file system of `path` (or of its nearest parent) has fewer than `nbytes` bytes free."""
    free = find_free_bytes(path)
    if free is not None and free < nbytes:
        message = f"{format_bytes(nbytes)} are needed and {format_bytes(free)} are free"
        message += f", {format_bytes(nbytes - free)} too few"
        raise NoRoom(message, path=path, hint="free some space, or write elsewhere")


def unallocated_bytes(root: Path, sizes: Mapping[str, int]) -> int:
    """Return the disk space in bytes that files of these sizes still need, by their names in directory `root`."""
    missing = 0
    for name, nbytes in sizes.items():
        try:
            reserved = 512 * (root / name).stat().st_blocks
        except OSError:
            reserved = 0
        missing += max(0, nbytes - reserved)
    return missing


def find_free_bytes(path: Path) -> int | None:
    """Return the free bytes on the file system of `path`, which need not exist yet; None in a store."""
    if is_remote(path):
        return None
    existing = path.absolute()
    with translate_os_errors(path):
        while not existing.exists():
            existing = existing.parent
        return shutil.disk_usage(existing).free


def create_file(
    path: Path,
    size: int,
    known_parts: Iterable[tuple[int, bytes]],
    *,
    must_be_new: bool = True,
    is_sparse: bool = False,
) -> None:
    """Create a file of `size` bytes with `known_parts` at their offsets, and reserve disk space for the rest.

    If `is_sparse`, reserves no space. If `must_be_new` is false, the file may exist already, in any size; bytes outside
    the `known_parts` keep their content.
    """
    with translate_os_errors(path):
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if must_be_new else 0) | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        file = LocalFile(path, fd)
        try:
            current_size = file.size
            if current_size < size and not is_sparse:
                try:
                    os.posix_fallocate(fd, 0, size)  # allocates the blocks, so that a full disk shows at once
                except (AttributeError, OSError) as error:
                    if isinstance(error, OSError) and error.errno not in UNSUPPORTED_CALL:
                        raise
                    os.ftruncate(fd, size)
            elif current_size != size:
                os.ftruncate(fd, size)
            for offset, content in known_parts:
                file.write_at(memoryview(content), offset)
        finally:
            file.close()


def write_new_file(path: Path, content: bytes, *, must_be_new: bool = True) -> None:
    """Create a file with these bytes; if `must_be_new` is false, it may exist already."""
    create_file(path, len(content), [(0, content)], must_be_new=must_be_new)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, if they are missing; a store needs no directories."""
    if not is_remote(path):
        with translate_os_errors(path):
            retry_interrupted(path.mkdir, parents=True, exist_ok=True)


def write_patches(root: Path, patches: Iterable[tuple[str, tuple[int, bytes]]]) -> None:
    """Write bytes into existing files: each part is a file name, an offset and the bytes."""
    with OpenFiles(root, writable=True) as files:
        for name, (offset, content) in sorted(patches):
            files[name].write_at(memoryview(content), offset)


class TemporaryFile:
    """An empty temporary file, which is deleted with this object, or when `remove` is called."""

    def __init__(self) -> None:
        fd, name = tempfile.mkstemp(prefix="ckptkit-")
        os.close(fd)
        self.path = Path(name)
        self.remove = weakref.finalize(self, self.path.unlink, missing_ok=True)
