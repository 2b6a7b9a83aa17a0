"""Write and delete single small files, on a disk or in a store, where each is an object and one request."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from ckptkit.entry_points import load
from ckptkit.errors import translate_os_errors
from ckptkit.io.file import opening, read_at
from ckptkit.io.path import RemotePath, is_remote, known_store, refresh
from ckptkit.io.staging import publish

_PROBE = ".ckptkit-probe"


class SmallFiles(Protocol):
    """Single files of a store. Each method asks the store at once."""

    def tag(self, path: RemotePath) -> str:
        """Return what changes with the content of a file, such as its ETag; "" if there is no file."""

    def put(self, path: RemotePath, content: bytes, *, replaces: str | None = None) -> str:
        """Write a file as a whole and return its tag.

        Given `replaces`, a tag or "" for no file, raise `Occupied` if something else is there now. A store without
        conditions replaces it all the same.
        """

    def delete(self, path: RemotePath) -> None:
        """Delete a file. Nothing changes if there is none."""


def open_small_files(path: RemotePath) -> SmallFiles:
    """Return what writes single files to the store of a path that `to_destination` gave."""
    return cast(SmallFiles, load(known_store(path).small_files)(path))


def require_writable(directory: Path) -> None:
    """Raise `IOFailure` if a store cannot be written to: put an object into the directory and delete it."""
    if is_remote(directory):
        files = open_small_files(directory)
        files.put(directory / _PROBE, b"")
        files.delete(directory / _PROBE)


def read_file(path: Path) -> bytes:
    """Return the content of a small file as it is now; b"" if it is missing."""
    with translate_os_errors(path):
        if not refresh(path).exists():
            return b""
    with opening(path) as file:
        return read_at(file, file.size, 0)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file, which is the old or the new one at every moment."""
    if is_remote(path):
        open_small_files(path).put(path, content)
    else:
        publish(path, content, overwrite=True)


class LineFile(Protocol):
    """A small file that grows line by line."""

    def add(self, line: bytes) -> None:
        """Add a line."""

    def send(self) -> None:
        """Let others see the lines that were added."""


class LocalLines:
    """The lines of a local file, which is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, line: bytes) -> None:
        """Write a line."""
        with translate_os_errors(self._path), self._path.open("ab") as file:
            file.write(line)

    def send(self) -> None:
        """Do nothing: the lines are there."""


class StoreLines:
    """The lines of an object, held in memory until `send` puts all of them.

    It raises `Occupied` if another process has put the object meanwhile: a second training of the same run.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._files = open_small_files(path)
        self._tag = self._files.tag(path)
        self._content = bytearray(read_file(path))
        self._sent = len(self._content)

    def add(self, line: bytes) -> None:
        """Keep a line in memory."""
        self._content += line

    def send(self) -> None:
        """Put the object, if it has more lines now."""
        if len(self._content) > self._sent:
            self._tag = self._files.put(self._path, bytes(self._content), replaces=self._tag)
            self._sent = len(self._content)


def open_lines(path: Path) -> LineFile:
    """Return a small file to add lines to; a local one appears with the first line."""
    return StoreLines(path) if is_remote(path) else LocalLines(path)
