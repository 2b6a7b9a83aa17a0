"""The protocol of a destination in a store: claim, write, complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import FilePiece

CLAIM = ".ckptkit-upload.json"  # the object that holds a place: in a directory, or beside a file
NOTES = ".ckptkit-upload"  # the folder for notes of the processes that share an upload: in a directory, beside a file

Check = Callable[[], Iterable[str]]


class Destination(Protocol):
    """A place at `path` in a store, to which files go. Readers see all of them, or none.

    claim -> put and put_small, in any order -> complete -> mark -> commit

    It is made with the `sizes` in bytes of its large files and others that are known, by name; with the names of its
    `marks`, which come last and in this order, since no reader takes the rest for a checkpoint without them; and with a
    `plan`: text that is the same for uploads of the same files only. If `is_file`, the one file becomes the object at
    `path` itself. Several threads may put pieces at the same time, and begin those of a file in order.
    `sent_bytes` counts what this process sent, `kept_bytes` what it did not send because an earlier one had.
    """

    path: RemotePath
    sent_bytes: int
    kept_bytes: int

    def claim(self, *, overwrite: bool, check: Check) -> None:
        """Take the place for this upload, or go on with an interrupted one of the same plan.

        With `overwrite`, `check` raises an error if what is there may not be replaced, and names the files to delete
        first, or all files of a checkpoint whose neighbors stay. Raises `Occupied` if something is there, or another
        upload is under way.
        """

    def join(self) -> None:
        """Take part in an upload of the same plan that another process has claimed; `sizes` may be of our files only.

        Each file is sent by one process. Waits for the other to begin. Raises `Occupied` if there is no such upload,
        `Unsupported` if the store lets only one process write.
        """

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a piece of a file, whose CRC-32 is `crc`, unless the store has it.

        It may keep `data`, and wait for the pieces before it where a store takes a file from start to end.
        """

    def stop(self, error: BaseException) -> None:
        """End what is under way, since no more is put. Raises the error to the threads that wait in `put`."""

    def put_small(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:
        """Send a whole file that is no mark, unless the store has it."""

    def complete(self, name: str, crc: int) -> None:
        """End a file of which all pieces have been put; `crc` is of the whole. Raises `IOFailure` if it differs."""

    def mark(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:
        """Send a whole file that is a mark. Raises `Occupied` if another one is there."""

    def note(self, name: str, data: bytes) -> None:
        """Keep a note for other processes of the same upload, until it is committed.

        Raises `Unsupported` if no file can be made by several processes.
        """

    def notes(self) -> Mapping[str, bytes]:
        """Return the notes of all processes, by name; none before the place is claimed.

        Raises `Unsupported` if no file can be made by several processes.
        """

    def commit(self) -> None:
        """End the upload: everything is visible, and the place is no longer held."""

    def remarks(self) -> list[str]:
        """Return what the store could not do, once the place was claimed."""
