"""Where a checkpoint of a run appears: in a local directory, or in a store."""

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
    """A place at `path` for one checkpoint, on every rank: `open` it, write to `room`, then `show` or `discard`."""

    @property
    def path(self) -> Path:
        """Return where the checkpoint appears."""

    @property
    def room(self) -> Path:
        """Return where the checkpoint is written."""

    def open(self) -> None:
        """Take the place, on all ranks together. Raises `Occupied` on all if a checkpoint is there."""

    def writer(self, to: str, files: Mapping[str, bytes], tied: Mapping[KeyPath, str]) -> StorageWriter:
        """Return what writes a state in format `to`, with small files beside it; see `RoomWriter`."""

    def show(self) -> None:
        """Make what was written visible, on all ranks together."""

    def discard(self) -> None:
        """Let go of the place."""


class StagedPlace:
    """A local directory, which is made under a hidden name."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._stage = Stage(path)
        self._ranks = ranks
        self.path = self._stage.dst
        self.room = self._stage.path

    def open(self) -> None:
        """Make the hidden directory."""
        self.room = self._ranks.on_first(lambda: self._stage.open().path)

    def writer(self, to: str, files: Mapping[str, bytes], tied: Mapping[KeyPath, str]) -> StorageWriter:
        """Return a writer into the hidden directory."""
        return RoomWriter(self.room, to, files=files, tied=tied)

    def show(self) -> None:
        """Give the directory its name."""
        self._ranks.on_first(self._stage.commit)

    def discard(self) -> None:
        """Remove the hidden directory."""
        self._stage.discard()


class StorePlace:
    """A prefix in a store, in a run that only this training saves to.

    What a save that died has left there is replaced; with `overwrite` a checkpoint is, too. A failed save leaves its
    claim and what it sent: no reader takes it for a checkpoint, and the next save of the same step replaces it.
    """

    def __init__(self, path: RemotePath, ranks: Ranks, *, overwrite: bool = False) -> None:
        self.path = self.room = path
        self._ranks = ranks
        self._overwrite = overwrite

    def open(self) -> None:
        """Look whether the place is free."""
        if not self._overwrite:
            self._ranks.on_first(lambda: require_free(self.path))

    def writer(self, to: str, files: Mapping[str, bytes], tied: Mapping[KeyPath, str]) -> StorageWriter:  # noqa: ARG002
        """Return a writer to the store, which has one format and no ties."""
        return StoreWriter(self.path, files=files, overwrite=self._overwrite, takes_over=True)

    def show(self) -> None:
        """Do nothing: the writer shows what it has finished."""

    def discard(self) -> None:
        """Do nothing."""
