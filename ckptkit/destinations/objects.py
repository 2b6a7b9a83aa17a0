"""Write and delete single small objects of a store: the table of all stores where ckptkit does that."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from ckptkit.destinations.stores import scheme_of
from ckptkit.files.path import RemotePath

OBJECTS = {  # by the scheme of a URL
    "s3": "ckptkit.destinations.s3_objects:S3Objects",
}


class Objects(Protocol):
    """The single objects of a store. Each method asks the store at once."""

    def tag(self, path: RemotePath) -> str:
        """Return what changes with the content of an object, such as its ETag; "" if there is no object."""

    def put(self, path: RemotePath, content: bytes, *, replaces: str | None = None) -> str:
        """Write an object as a whole and return its tag.

        Given `replaces`, a tag or "" for no object, raise `Occupied` if something else is there now. A store without
        conditions replaces it all the same.
        """

    def delete(self, path: RemotePath) -> None:
        """Delete an object. Nothing changes if there is none."""


def open_objects(path: RemotePath) -> Objects:
    """Return what writes single objects to the store of a path that `to_destination` gave."""
    module, _, name = OBJECTS[scheme_of(path)].partition(":")
    return cast(Objects, getattr(import_module(module), name)(path))
