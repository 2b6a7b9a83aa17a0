"""Read and write the small files of a run beside its checkpoints, in a local directory or in a store.

Only rank 0 writes them. In a store each is an object that is put as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ckptkit.errors import translate_os_errors
from ckptkit.io.file import opening, read_at
from ckptkit.io.path import RemotePath
from ckptkit.io.small_files import open_small_files
from ckptkit.io.staging import publish
from ckptkit.training.places import look_again

_PROBE = ".ckptkit-probe"


def require_writable(run: Path) -> None:
    """Raise `IOFailure` if a run in a store cannot be written to, by putting an object there and deleting it."""
    if isinstance(run, RemotePath):
        files = open_small_files(run)
        files.put(run / _PROBE, b"")
        files.delete(run / _PROBE)


def make_folder(run: Path) -> None:
    """Make the directory of a run; a store needs none."""
    if not isinstance(run, RemotePath):
        with translate_os_errors(run):
            run.mkdir(parents=True, exist_ok=True)


def read_file(path: Path) -> bytes:
    """Return the content of a file of a run, b"" if it is missing."""
    with translate_os_errors(path):
        if not look_again(path).exists():
            return b""
    with opening(path) as file:
        return read_at(file, file.size, 0)


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a run, which is the old or the new one at every moment."""
    if isinstance(path, RemotePath):
        open_small_files(path).put(path, content)
    else:
        publish(path, content, overwrite=True)


class LineFile(Protocol):
    """A file of a run that grows line by line."""

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
    """Return a file of a run, to add lines to."""
    return StoreLines(path) if isinstance(path, RemotePath) else LocalLines(path)
