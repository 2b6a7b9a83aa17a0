"""Write and delete single small files of a store, each one request."""

from __future__ import annotations

from typing import Protocol, cast

from ckptkit.entry_points import load
from ckptkit.io.path import RemotePath


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
    return cast(SmallFiles, load(path.known.small_files)(path))
