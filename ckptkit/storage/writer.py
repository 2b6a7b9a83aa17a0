"""Write through torch to a local directory or an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptkit.argument_types import with_checked_arguments
from ckptkit.errors import Occupied, Unsupported, Usage
from ckptkit.formats import find_format_of_file_name
from ckptkit.io.destination import require_multi_process_store, to_destination
from ckptkit.io.path import is_remote
from ckptkit.state.options import DEFAULT_SHARD_SIZE
from ckptkit.storage.local_writer import StagedWriter
from ckptkit.storage.plans import PlannedWriter
from ckptkit.storage.small_files import SmallFile
from ckptkit.storage.store_writer import FORMAT, StoreWriter
from ckptkit.summary import format_call
from ckptkit.words import command_line, parse_bytes

_LOCAL_FORMAT = "hf"
_PATIENCE = 1.0  # seconds


class Writer(PlannedWriter):
    """Writes a state to `path`. The checkpoint appears atomically, when all ranks are done.

    `path` is a local directory or the URL of a prefix in a store. `format` is a format that ckptkit writes: by default
    "hf" in a local directory and "dcp" in a store, which supports no other. "dcp" and "pt" store non-tensor entries in
    their files. With "hf", the weights get the model's own names, without their key in the state (`model`). All other
    entries go into a DCP directory `training` in the directory of the weights. A state of several models without other
    entries keeps its names. `files` are small files to put beside the weights (config.json, a tokenizer's): bytes,
    text, the path of a file, a dict, or a config of transformers, which becomes JSON. The constructor refuses anything
    else. `max_shard_size` is in bytes, or text such as "5GB".

    `overwrite` replaces an existing checkpoint, and refuses a directory with entries that ckptkit does not know.
    Without `sync`, a local checkpoint may not survive a power failure. If a save of several ranks fails, it may leave a
    hidden directory; the writer deletes this directory at its next save, or when the writer itself is deleted. In a
    store, a failed save leaves its claim and the objects that it sent. No reader opens these objects as a checkpoint.
    The next save of the same writer replaces them; another writer needs `overwrite`. A writer makes one save at a time:
    another one, such as a second `dcp.async_save`, raises `Occupied`.
    """

    @with_checked_arguments
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
        self._writer = self._choose_writer(path)
        self._is_coordinator = False
        self._saving_thread: Thread | None = None
        self._refused_thread: Thread | None = None

    def __repr__(self) -> str:
        return format_call(self, self._writer.path, format=self._format, overwrite=self._overwrite)

    @classmethod
    def parse_id(cls, checkpoint_id: str | os.PathLike[str]) -> Path:
        """Return a local path, or a path in a store. Raises `Usage` for the name of a file: ranks write a directory."""
        path = to_destination(checkpoint_id)
        require_multi_process_store(path)
        if find_format_of_file_name(path.name) is not None:
            message = "the ranks of a job write a directory, but this is the name of a file"
            raise Usage(message, path=path, hint=f"name a directory, such as `{path.stem}`")
        return path

    def _choose_writer(self, destination: str | os.PathLike[str]) -> StagedWriter | StoreWriter:
        path = self.parse_id(destination)
        if is_remote(path):
            if self._format not in (None, FORMAT):
                message = f"`{self._format}` cannot go straight to a store: several ranks would write one object"
                convert = command_line("convert", path, "OUT", "--to", self._format)
                hint = f"save `{FORMAT}`, then run {convert}; OUT may be a URL"
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
        # `set_up_storage_writer` raises the error: only there does torch raise it on all ranks
        self._refused_thread = current_thread() if self._is_saving_in_another_thread() else None
        if self._refused_thread is not None:
            return
        path = None if checkpoint_id is None else self.parse_id(checkpoint_id)
        if path is not None and is_remote(path) != is_remote(self._writer.path):
            self._writer = self._choose_writer(path)
        self._writer.reset(path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._refused_thread is current_thread():
            hint = "wait for the result of the earlier save, or make a Writer for each save"
            raise Occupied("this writer is still saving", path=self._writer.path, hint=hint)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator, self._saving_thread = is_coordinator, current_thread()

    def _is_saving_in_another_thread(self) -> bool:
        thread = self._saving_thread
        if thread is None or thread is current_thread():
            return False
        thread.join(_PATIENCE)  # the thread of a save that failed may still be ending
        return self._saving_thread is thread and thread.is_alive()

    @contextmanager
    def _stage(self, *, is_last: bool = False) -> Iterator[None]:
        """Let others save after an error in the block, or after the last stage of a save."""
        try:
            yield
        except BaseException:
            self._saving_thread = None
            raise
        if is_last:
            self._saving_thread = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._stage():
            return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._stage(is_last=not self._is_coordinator):
            return self._writer.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._stage(is_last=True):
            self._writer.finish(metadata, results)
