"""Write through torch to any place: a local directory, or a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptkit.arguments import checked
from ckptkit.errors import CkptError, Unsupported
from ckptkit.io.destination import require_shared, to_destination
from ckptkit.io.path import is_remote
from ckptkit.state.options import DEFAULT_SHARD_SIZE
from ckptkit.storage.room_writer import StagedWriter
from ckptkit.storage.small_files import SmallFile
from ckptkit.storage.store_writer import FORMAT, StoreWriter
from ckptkit.summary import as_call
from ckptkit.words import parse_bytes

_LOCAL_FORMAT = "hf"


class Writer(StorageWriter):
    """A writer of a state to `path`, where it appears when all ranks are done, whole or not at all.

    `path` is a local directory or the URL of a prefix in a store. `format` is one that ckptkit writes: by default "hf"
    in a local directory and "dcp" in a store, which takes no other. Entries that are no tensors lie in the files of
    "dcp" and "pt". With "hf" the weights have the names that the model itself gives them, without the key that it has
    in the state (`model`); all else lies in a DCP directory `training` beside the weights. A state of several models
    without entries of other kinds keeps its names. `files` are small ones to put beside the weights (config.json, a
    tokenizer's): bytes, text, the path of a file, a dict, or a config of transformers, which becomes JSON. The
    constructor refuses anything else. `max_shard_size` is in bytes, or text such as "5GB".
    `overwrite` replaces a checkpoint that is there, and refuses a directory with entries that ckptkit does not know;
    without `sync` a local checkpoint may not outlive a power cut. A save that failed may leave a hidden directory,
    which goes away with the writer, or at its next save. In a store it leaves its claim and what was sent, which no
    reader takes for a checkpoint; the next save of the writer replaces them, and one of another with `overwrite`.
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,  # noqa: A002 - as users call it
        *,
        files: Mapping[str, SmallFile] | None = None,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        overwrite: bool = False,
        sync: bool = True,
    ) -> None:
        super().__init__()
        self._format = format
        self._files = dict(files or {})
        self._max_shard_size = parse_bytes(max_shard_size)
        self._overwrite = overwrite
        self._sync = sync
        self._writer = self._choose(path)

    def __repr__(self) -> str:
        return as_call(self, self._writer.path, format=self._format, overwrite=self._overwrite)

    def _choose(self, place: str | os.PathLike[str]) -> StagedWriter | StoreWriter:
        path = to_destination(place)
        require_shared(path)
        if is_remote(path):
            if self._format not in (None, FORMAT):
                message = f"`{self._format}` cannot go straight to a store: several ranks would write one object"
                hint = f"save `{FORMAT}`, then run `ckptkit convert {path} OUT --to {self._format}`; OUT may be a URL"
                raise Unsupported(message, path=path, hint=hint)
            return StoreWriter(path, files=self._files, overwrite=self._overwrite)
        return StagedWriter(
            path,
            self._format or _LOCAL_FORMAT,
            files=self._files,
            max_shard_size=self._max_shard_size,
            overwrite=self._overwrite,
            sync=self._sync,
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another path if one is given."""
        path = None if checkpoint_id is None else to_destination(checkpoint_id)
        if path is not None and is_remote(path) != is_remote(self._writer.path):
            self._writer = self._choose(path)
        self._writer.reset(path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise `Unsupported` for several ranks that do not talk to each other."""
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the place, and return the plans with what each rank is to do."""
        return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items."""
        return self._writer.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint and show it."""
        self._writer.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a place that ckptkit writes to: a local path, or the URL of a store."""
        try:
            require_shared(to_destination(checkpoint_id))
        except (TypeError, CkptError):
            return False
        return True
