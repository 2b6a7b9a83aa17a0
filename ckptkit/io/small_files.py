"""Write and delete small files, on a disk or in a store, where each file is one object and one request."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from ckptkit.entry_points import import_object
from ckptkit.errors import translate_os_errors
from ckptkit.io.file import opening, read_at
from ckptkit.io.path import RemotePath, capabilities_at, drop_cached_listing, is_remote
from ckptkit.io.staging import publish_file

_PROBE = ".ckptkit-probe"


class SmallFiles(Protocol):
    """Single files of a store. No method uses cached responses."""

    def find_content_tag(self, path: RemotePath) -> str:
        """Return a tag that changes with the content of a file, such as its ETag; "" if the file does not exist."""

    def put(self, path: RemotePath, content: bytes, *, replaced_tag: str | None = None) -> str:
        """Write a file atomically and return its tag.

        `replaced_tag` is a tag, or "" for no file: raises `Occupied` if the current file has another tag. A store
        without conditional writes replaces the file anyway.
        """

    def delete(self, path: RemotePath) -> None:
        """Delete a file, if it exists."""


def small_file_store_for(path: RemotePath) -> SmallFiles:
    """Return the writer of single files for the store of a path from `to_destination`."""
    return cast(SmallFiles, import_object(capabilities_at(path).small_files)(path))


def require_writable_store(directory: Path) -> None:
    """Raise `IOFailure` if a store is not writable: creates a probe object in the directory and deletes it."""
    if is_remote(directory):
        files = small_file_store_for(directory)
        files.put(directory / _PROBE, b"")
        files.delete(directory / _PROBE)


def read_current_content(path: Path) -> bytes:
    """Return the current content of a small file; b"" if it is missing."""
    with translate_os_errors(path):
        if not drop_cached_listing(path).exists():
            return b""
    with opening(path) as file:
        return read_at(file, file.size, 0)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    if is_remote(path):
        small_file_store_for(path).put(path, content)
    else:
        publish_file(path, content, overwrite=True)


class LocalLines:
    """The lines of a local file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add_line(self, line: bytes) -> None:
        with translate_os_errors(self._path), self._path.open("ab") as file:
            file.write(line)

    def flush_lines(self) -> None:
        """Do nothing: the lines are already in the file."""


class StoreLines:
    """The lines of an object, buffered in memory until `flush_lines` writes all of them.

    `flush_lines` raises `Occupied` if another process has written the object meanwhile: a second training of the same
    run.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._files = small_file_store_for(path)
        self._tag = self._files.find_content_tag(path)
        self._content = bytearray(read_current_content(path))
        self._sent = len(self._content)

    def add_line(self, line: bytes) -> None:
        self._content += line

    def flush_lines(self) -> None:
        if len(self._content) > self._sent:
            self._tag = self._files.put(self._path, bytes(self._content), replaced_tag=self._tag)
            self._sent = len(self._content)


def open_line_writer(path: Path) -> LocalLines | StoreLines:
    """Return a small file to append lines to; a local file is created with the first line."""
    return StoreLines(path) if is_remote(path) else LocalLines(path)
