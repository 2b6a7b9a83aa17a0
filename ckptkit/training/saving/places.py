"""Destinations of a run's checkpoints: a local directory or an object store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.storage import StorageWriter

from ckptkit.io.path import RemotePath
from ckptkit.io.staging import Stage
from ckptkit.layout import KeyPath
from ckptkit.storage import RoomWriter
from ckptkit.storage.ranks import Ranks
from ckptkit.storage.store_writer import StoreWriter, require_free


class SavePlace(Protocol):
    """The destination of one checkpoint, on every rank: call `open`, write to `room`, then call `show` or `discard`."""

    @property
    def path(self) -> Path:
        """Return the final path of the checkpoint."""

    @property
    def room(self) -> Path:
        """Return the path that the ranks write to until `show`."""

    def open(self) -> None:
        """Reserve the destination; a collective. Raises `Occupied` on all ranks if it has a checkpoint."""

    def writer(self, to: str, files: Mapping[str, bytes], tied: Mapping[KeyPath, str]) -> StorageWriter:
        """Return a writer of a state in format `to`, which also writes the small `files`; see `RoomWriter`."""

    def show(self) -> None:
        """Make the written checkpoint visible under its final path; a collective."""

    def discard(self) -> None:
        """Release the destination without a checkpoint."""


class StagedPlace:
    """A local directory. The ranks write it under a hidden name, and `show` renames it."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._stage = Stage(path)
        self._ranks = ranks
        self.path = self._stage.dst
        self.room = self._stage.path

    def open(self) -> None:
        """Create the hidden directory."""
        self.room = self._ranks.on_first(lambda: self._stage.open().path)

    def writer(self, to: str, files: Mapping[str, bytes], tied: Mapping[KeyPath, str]) -> StorageWriter:
        """Return a writer into the hidden directory."""
        return RoomWriter(self.room, to, files=files, tied=tied)

    def show(self) -> None:
        """Rename the hidden directory to its final path."""
        self._ranks.on_first(self._stage.commit)

    def discard(self) -> None:
        """Remove the hidden directory."""
        self._stage.discard()


class StorePlace:
    """A prefix in an object store, in a run that only this training saves to.

    The save replaces files of an earlier, interrupted save, and with `overwrite` also a complete checkpoint. A failed
    save leaves its claim and the uploaded objects: readers ignore them, and the next save of the step replaces them.
    """

    def __init__(self, path: RemotePath, ranks: Ranks, *, overwrite: bool = False) -> None:
        self.path = self.room = path
        self._ranks = ranks
        self._overwrite = overwrite

    def open(self) -> None:
        """Raise `Occupied` if the prefix has a checkpoint, unless it may be overwritten."""
        if not self._overwrite:
            self._ranks.on_first(lambda: require_free(self.path))

    def writer(self, to: str, files: Mapping[str, bytes], tied: Mapping[KeyPath, str]) -> StorageWriter:  # noqa: ARG002
        """Return a writer to the store. It ignores `to` and `tied`: a store has only the sharded format."""
        return StoreWriter(self.path, files=files, overwrite=self._overwrite, takes_over=True)

    def show(self) -> None:
        """Do nothing: the writer itself makes a finished checkpoint visible."""

    def discard(self) -> None:
        """Do nothing: the next save of this step replaces the uploaded objects."""
