"""Open local files whose names may come from an untrusted source, and read and write byte ranges."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from ckptkit.errors import Incomplete, IOFailure, Unsafe, translate_os_errors, truncated_error
from ckptkit.io.disk import close_descriptor

# Larger writes make the kernel look for large free pages, which virtual machines first have to get from their host:
# measured in one, 1.6 GB took 0.6 s in writes of 64 KiB and 2 s in writes of 4 MiB.
_WRITE_BYTES = 1 << 17
_CACHE_DIRECTORY = re.compile(r"(models|datasets|spaces)--.+", re.DOTALL)  # of a repository in the Hub's cache
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class LocalFile:
    """A local file at `path`; owns the open descriptor `fd`."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @property
    def size(self) -> int:
        with translate_os_errors(self.path):
            return os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`. Raises `Corrupt` if the file ends before."""
        done = 0
        with translate_os_errors(self.path):
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
                if count == 0:
                    raise truncated_error(offset + len(buffer), self.size, path=self.path)
                done += count

    def write_at(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at byte `offset`. Raises `IOFailure`, or `NoRoom` if the disk is full."""
        done = 0
        with translate_os_errors(self.path):
            while done < len(buffer):
                done += os.pwrite(self._fd, buffer[done : done + _WRITE_BYTES], offset + done)

    def announce_order(self, *, in_order: bool) -> None:
        """Tell the kernel whether to read further ahead (sequential reads), or not at all (random reads)."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only a hint for performance
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL if in_order else os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Close the file; some file systems report a failed write only here."""
        with translate_os_errors(self.path):
            close_descriptor(self._fd)


def open_regular(path: Path) -> LocalFile:
    """Open the regular file `path` for reading. Raises `Unsafe` for links, devices, pipes and directories.

    A link in a snapshot of the Hub's cache to a blob of the same cache counts as the blob: see `find_hub_cache_blob`.
    """
    try:
        try:
            fd = os.open(path, _READ_FLAGS)
        except OSError as error:
            if error.errno != errno.ELOOP or (blob := find_hub_cache_blob(path)) is None:
                raise
            fd = os.open(blob, _READ_FLAGS)
    except FileNotFoundError as error:
        raise Incomplete(
            "the file is missing", path=path, hint="copy the file here; it was lost or never copied"
        ) from error
    except ValueError as error:
        raise Unsafe(f"{path.name!a} cannot be a file's name", path=path.parent) from error
    except OSError as error:
        if error.errno == errno.ELOOP:  # O_NOFOLLOW reports a link like this
            hint = "copy the file itself into the checkpoint"
            raise Unsafe("the file is a symbolic link", path=path, hint=hint) from error
        raise IOFailure((error.strerror or str(error)).lower(), path=path) from error
    with translate_os_errors(path), ExitStack() as undo:
        undo.callback(close_descriptor, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Unsafe("not a regular file", path=path)
        undo.pop_all()
    return LocalFile(path, fd)


def find_hub_cache_blob(path: Path) -> Path | None:
    """Return the blob that a link in the Hub's cache leads to; None for a file, and for a link to anywhere else.

    `models--org--name/snapshots/REVISION/[folder/]file` is a link to `models--org--name/blobs/ID`. No directory in
    between may be a link, so that no name in the cache can lead outside it, and opening the blob follows no link.
    Source: huggingface_hub/file_download.py.
    """
    if not path.is_symlink():
        return None
    folder = path.absolute().parent
    cache = next((above for above in folder.parents if _CACHE_DIRECTORY.fullmatch(above.name)), None)
    if cache is None:
        return None
    real, inside = Path(os.path.realpath(cache)), folder.relative_to(cache)
    blob, blobs = folder / os.readlink(path), real / "blobs"
    is_inside = inside.parts[0] == "snapshots" and Path(os.path.realpath(folder)) == real / inside
    return blobs / blob.name if is_inside and Path(os.path.realpath(blob.parent)) == blobs else None


def is_link_outside_cache(path: Path) -> bool:
    """Return whether `path` is a symbolic link, other than a link to a blob in the Hub's cache."""
    return path.is_symlink() and find_hub_cache_blob(path) is None


def open_existing_for_writing(path: Path) -> LocalFile:
    with translate_os_errors(path):
        return LocalFile(path, os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
