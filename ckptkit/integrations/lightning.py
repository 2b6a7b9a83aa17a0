"""Save and load the checkpoints of Lightning's Trainer with ckptkit's writer and reader.

Trainer(..., plugins=[CkptkitIO()])

A checkpoint is a DCP directory. Each top-level value that Lightning saves is an entry. A value with tensors inside,
such as the optimizer states, is split: each tensor is an entry named by its key path, with a CRC-32, and the entry
`ckptkit_form` has the nested dicts and lists, with key paths in place of the tensors.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.open import LazyCheckpoint
from ckptkit.errors import Corrupt, Usage, warn
from ckptkit.formats import decompress_entries
from ckptkit.io.path import to_local_path
from ckptkit.layout import KeyPath, Layout
from ckptkit.runs.deletion import delete_checkpoint, deleting
from ckptkit.runs.keeper import protections_of
from ckptkit.runs.readers import readers_in
from ckptkit.storage.entries import archive_bytes_of, entry_as_torch_save
from ckptkit.storage.ranks import to_rank_error
from ckptkit.storage.writer import Writer
from ckptkit.training.saving.state import nest_leaves

FORM = "ckptkit_form"  # entry with the nested values, in which key paths replace the tensors
_NAME = "ckptkit.tensor"  # the single key of a dict that replaces a tensor; its value is the tensor's key path
_PATIENCE = 10.0  # seconds that a deletion waits for another process to finish deleting


class CkptkitIO(TorchCheckpointIO):
    """A plugin with which Lightning saves atomic checkpoints with a checksum of each tensor.

    Rank 0 saves the full state. Strategies that save shards do not use the plugin. If such a strategy saves a full
    model instead, the plugin writes Lightning's own file, because the strategy loads nothing else. The plugin also
    loads Lightning's own files. `save_top_k` does not remove a checkpoint that is pinned or that a watch is handling.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint to directory `path`, and replace an existing one. Raises a `CkptError`."""
        if storage_options is not None:
            raise Usage("storage options are not supported: the plugin writes to local directories")
        if FORM in checkpoint:
            raise Usage(f"expected another name than `{FORM}`, which ckptkit uses itself")
        directory = to_local_path(path)
        if isinstance(find_calling_strategy(), FSDPStrategy | ModelParallelStrategy):
            words = "wrote one file as Lightning does, without checksums, because this strategy loads only such a file"
            warn(f"{directory} is {words}")
            super().save_checkpoint(checkpoint, directory)
            return
        tensors: dict[KeyPath, Tensor] = {}
        form = {key: with_key_paths(value, (key,), tensors) for key, value in checkpoint.items()}
        state = nest_leaves(tensors)
        # DCP does not flatten a tuple
        others = {key: (form.pop(key),) for key in checkpoint if key not in state}
        writer = Writer(directory, "dcp", overwrite=True)
        try:
            dcp.save({**state, **others, FORM: (form,)}, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise to_rank_error(error, directory, "save") from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`, and verify the CRC-32 of each tensor.

        Raises `Corrupt` if a checksum differs. Unless `weights_only` is False, raises `Unsupported` for objects that
        torch does not load with `weights_only`.
        """
        if Path(path).is_file():
            return super().load_checkpoint(Path(path), map_location, weights_only)
        layout = decompress_entries(Checkpoint.open(path).layout)
        read = read_entry_bytes if weights_only is False else entry_as_torch_save
        entries = {name: torch.load(read(layout, name), weights_only=False) for name in layout.blobs}
        if FORM not in entries:
            raise Corrupt(f"no `{FORM}`: not a checkpoint of this plugin", path=path, hint="load it without the plugin")
        (form,) = entries.pop(FORM)
        stored = LazyCheckpoint(layout)
        names = {layout.key(name): name for name in layout.tensors}

        def load(key: tuple[str, ...]) -> Tensor:
            tensor = stored[names[key]].torch()
            is_place = isinstance(map_location, str | torch.device)
            return tensor.to(map_location) if is_place else tensor

        return {**{name: value for name, (value,) in entries.items()}, **with_tensors(form, load)}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, unless it is pinned, in use by a watch, or read by another entry of the run.

        Renames it to a hidden name first.
        """
        directory = Path(path)
        if not directory.is_dir():
            super().remove_checkpoint(directory)
            return
        with deleting(directory.parent, patience=_PATIENCE):
            if not (protections_of(directory) or directory.name in readers_in(directory.parent)):
                delete_checkpoint(directory)


def as_file(path: str | os.PathLike[str], weights_only: bool | None = None) -> BytesIO:
    """Return a checkpoint as Lightning's own file in memory, for `MyModule.load_from_checkpoint(as_file(path))`.

    Needs memory for two copies of the checkpoint. Raises the same errors as `CkptkitIO.load_checkpoint`.
    """
    file = BytesIO()
    torch.save(CkptkitIO().load_checkpoint(path, weights_only=weights_only), file)
    file.seek(0)
    return file


def find_calling_strategy() -> Strategy | None:
    """Return the Lightning strategy that calls the plugin, None without one.

    Searches the call stack, because Lightning does not pass the strategy to its plugins.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Strategy):
            return caller
        frame = frame.f_back
    return None


def read_entry_bytes(layout: Layout, name: str) -> BytesIO:
    """Return the saved bytes of an entry. Unpickling them may run code in the checkpoint."""
    blob = layout.blobs[name]
    return BytesIO(archive_bytes_of(blob, layout.root / blob.path))


def with_key_paths(value: Any, key_path: KeyPath, tensors: dict[KeyPath, Tensor]) -> Any:
    """Return a nested value with each tensor replaced by its key path, and add the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors[key_path] = value.detach()
        return {_NAME: list(key_path)}
    return map_members(value, lambda key, member: with_key_paths(member, (*key_path, str(key)), tensors))


def with_tensors(value: Any, load: Callable[[tuple[str, ...]], Tensor]) -> Any:
    """Undo `with_key_paths`: return a nested value with each key path replaced by the tensor that `load` returns."""
    if isinstance(value, dict) and value.keys() == {_NAME}:
        return load(tuple(value[_NAME]))
    return map_members(value, lambda _key, member: with_tensors(member, load))


def map_members(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a dict, list or tuple with `change(key, member)` in place of each member.

    Returns any other value, and one whose members do not change, itself: not every mapping can be made from pairs.
    """
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and type(value) not in (list, tuple):
        return value
    members = list(value.items() if is_mapping else enumerate(value))
    changed = [change(key, member) for key, member in members]
    if all(new is member for new, (_, member) in zip(changed, members, strict=True)):
        return value
    return type(value)(zip((key for key, _ in members), changed, strict=True) if is_mapping else changed)
