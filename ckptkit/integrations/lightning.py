"""Save and load the checkpoints of Lightning's Trainer with ckptkit's writer and reader.

Trainer(..., plugins=[CkptkitIO(background=True)])
Trainer(..., strategy=BackgroundModelParallelStrategy(), plugins=[CkptkitIO()])

The strategies save the same files as Lightning's. `CkptkitIO` saves a DCP directory. Each top-level value that
Lightning saves is an entry. A value with tensors inside, such as the optimizer states, is split: each tensor is an
entry named by its key path, with a CRC-32, and the entry `ckptkit_form` has the nested dicts and lists, with key paths
in place of the tensors.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.open import LazyCheckpoint
from ckptkit.errors import Corrupt, Unsupported, Usage, translate_os_errors, warn
from ckptkit.formats import decompress_entries
from ckptkit.integrations.background import BackgroundSaver, delete_in_store
from ckptkit.io.destination import to_destination
from ckptkit.io.path import drop_cached_listing, is_remote, to_path, to_uncached_path
from ckptkit.layout import KeyPath, Layout
from ckptkit.runs.deletion import delete_checkpoint, is_handled_by_watch, is_pinned, locked_for_deletion
from ckptkit.runs.retention import dependents_by_checkpoint
from ckptkit.storage.entries import archive_bytes_of, entry_as_torch_save
from ckptkit.storage.ranks import Ranks, to_rank_error
from ckptkit.storage.writer import Writer
from ckptkit.training.saving.run import failed_deletions_as_warnings
from ckptkit.training.saving.state import nest_leaves

FORM = "ckptkit_form"  # entry with the nested values, in which key paths replace the tensors
_NAME = "ckptkit.tensor"  # the single key of a dict that replaces a tensor; its value is the tensor's key path
_PATIENCE = 10.0  # seconds that a deletion waits for another process to finish deleting


class CkptkitIO(TorchCheckpointIO):
    """A plugin with which Lightning saves atomic checkpoints with a checksum of each tensor.

    Rank 0 saves the full state. Strategies that save shards do not use the plugin. If such a strategy saves a full
    model instead, the plugin writes Lightning's own file, because the strategy loads nothing else. The plugin also
    loads Lightning's own files. `save_top_k` does not remove a checkpoint that is pinned or that a watch is handling.

    With `background`, the training waits only until the state is copied, and a thread writes it. `save_top_k` removes
    an older checkpoint when the new one is visible. `trainer.fit` waits for the last save. A save that fails raises in
    the next save, or at the end of `trainer.fit`.
    """

    def __init__(self, *, background: bool = False) -> None:
        super().__init__()
        # rank 0 alone calls the plugin
        self._saver = BackgroundSaver(partial(Ranks, is_alone=True)) if background else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint to directory or URL `path`, and replace an existing one. Raises a `CkptError`."""
        if storage_options is not None:
            raise Usage("storage options are not supported")
        if FORM in checkpoint:
            raise Usage(f"expected another name than `{FORM}`, which ckptkit uses itself")
        if isinstance(find_calling_strategy(), FSDPStrategy | ModelParallelStrategy):
            try:
                file = to_destination(path)
            except Usage as error:  # these strategies make a `Path` of a URL
                raise full_model_in_store_error(Path(path)) from error
            words = "wrote one file as Lightning does, without checksums, because this strategy loads only such a file"
            warn(f"{file} is {words}")
            super().save_checkpoint(checkpoint, file)
            return
        directory = to_destination(path)
        tensors: list[tuple[KeyPath, Tensor]] = []
        form = {key: replace_tensors_with_paths(value, (key,), tensors) for key, value in checkpoint.items()}
        top_level = {path[0] for path, _ in tensors}
        # DCP does not flatten a tuple
        others = {key: (form.pop(key),) for key in checkpoint if key not in top_level}
        require_distinct_names([*(path for path, _ in tensors), *((key,) for key in others)])
        state = nest_leaves(dict(tensors))
        entries = {**state, **others, FORM: (form,)}
        if self._saver is not None:
            save_in_background(self._saver, directory, lambda folder: dcp.save(entries, checkpoint_id=folder))
            return
        writer = Writer(directory, "dcp", overwrite=True)
        try:
            dcp.save(entries, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise to_rank_error(error, directory, "save") from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`, and verify the CRC-32 of each tensor.

        Raises `Corrupt` if a checksum differs. Unless `weights_only` is False, raises `Unsupported` for objects that
        torch does not load with `weights_only`.
        """
        if self._saver is not None:
            self._saver.wait()
        source = drop_cached_listing(to_path(path))
        if source.is_file():
            return super().load_checkpoint(str(source), map_location, weights_only)
        layout = decompress_entries(Checkpoint.open(source).layout)
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

        return {**{name: value for name, (value,) in entries.items()}, **replace_paths_with_tensors(form, load)}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, unless it is pinned, in use by a watch, or read by another entry of the run.

        Renames it to a hidden name first.
        """
        remove_checkpoint(path, self._saver)

    def teardown(self) -> None:
        """Wait for the last save."""
        if self._saver is not None:
            self._saver.wait()
        super().teardown()


class _SavesInBackground(ParallelStrategy):
    """Mixin for Lightning's strategies: saves shards in the background."""

    @cached_property
    def _saver(self) -> BackgroundSaver:
        return BackgroundSaver()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save a checkpoint to directory or URL `filepath`, and replace an existing one.

        Raises a `CkptError` on all ranks.
        """
        save = super().save_checkpoint
        path = to_destination(self.broadcast(filepath))
        weights = checkpoint.get("state_dict", {}).values()
        if storage_options is not None or not any(isinstance(one, DTensor | ShardedTensor) for one in weights):
            if is_remote(path):
                raise full_model_in_store_error(path)
            save(checkpoint, filepath, storage_options)
            return
        save_in_background(self._saver, path, lambda folder: save(checkpoint, folder))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        source = self.broadcast(checkpoint_path)
        with self._saver.local_copy(source, is_first_on_machine=self.local_rank == 0) as local:
            return super().load_checkpoint(local, weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint when the one being saved is visible. See `CkptkitIO.remove_checkpoint`."""
        if self.is_global_zero:
            remove_checkpoint(filepath, self._saver)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is visible. Raises the error of any rank on all ranks."""
        self._saver.wait()

    def teardown(self) -> None:
        """Wait for the last save."""
        try:
            self.wait_for_save()
        finally:
            super().teardown()


class BackgroundModelParallelStrategy(_SavesInBackground, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (FSDP2), which waits only for a copy of the state, not until it is written.

    A checkpoint has the same files as one of Lightning, which loads it, and a manifest with a CRC-32 of each tensor. It
    appears under its name when all ranks have written it. `save_top_k` removes an older checkpoint only then, unless it
    is pinned. A save that fails raises in the next save, or at the end of `trainer.fit`. A full model
    (`save_distributed_checkpoint=False`) is saved by Lightning itself, and the training waits until it is written.
    """


class BackgroundFSDPStrategy(_SavesInBackground, FSDPStrategy):
    """The same for Lightning's FSDPStrategy (FSDP1) with `state_dict_type="sharded"`."""


def full_model_in_store_error(path: Path) -> Unsupported:
    hint = "save shards with BackgroundModelParallelStrategy or BackgroundFSDPStrategy, or save to a local directory"
    return Unsupported("Lightning itself saves a full model, and only locally", path=path, hint=hint)


def save_in_background(saver: BackgroundSaver, path: Path, write: Callable[[Path], object]) -> None:
    """Save directory `path`. Waits until it is visible outside of `trainer.fit`, where nothing else would wait."""
    saver.save(path, write, overwrite=True)
    strategy = find_calling_strategy()
    if strategy is None or strategy.lightning_module is None or strategy.lightning_module.trainer.state.finished:
        saver.wait()


def remove_checkpoint(filepath: str | os.PathLike[str], saver: BackgroundSaver | None) -> None:
    """Delete a checkpoint when the one being saved is visible, unless it is protected.

    A training may have been resumed from a checkpoint in another directory, which stays. ModelCheckpoint asks for its
    deletion if it is in a store.
    """
    path, strategy = to_uncached_path(filepath), find_calling_strategy()
    if is_remote(path) and strategy is not None and strategy.lightning_module is not None:
        callbacks = strategy.lightning_module.trainer.checkpoint_callbacks
        folders = {to_uncached_path(getattr(callback, "dirpath", None) or ".") for callback in callbacks}
        if folders.isdisjoint(path.parents):  # a name such as {val/loss} makes directories below
            return
    if saver is None:
        delete_unless_protected(path)
    else:
        saver.then(partial(delete_unless_protected, path.absolute()))


def delete_unless_protected(path: Path) -> None:
    """Delete a checkpoint, unless it is pinned, in use by a watch, or read by another entry of the run.

    Renames a directory to a hidden name first. An error is a warning.
    """
    if is_remote(path):
        delete_in_store(path.parent, lambda: [path])
        return
    with failed_deletions_as_warnings(), translate_os_errors(path):
        if not path.is_dir():
            TorchCheckpointIO().remove_checkpoint(path)
            return
        with locked_for_deletion(path.parent, patience=_PATIENCE):
            # not by what the trainer recorded as the best: ModelCheckpoint decides that, and an old record is outdated
            if not (is_pinned(path) or is_handled_by_watch(path) or path.name in dependents_by_checkpoint(path.parent)):
                delete_checkpoint(path)


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


def require_distinct_names(paths: Sequence[KeyPath]) -> None:
    """Raise `Unsupported` if two entries have one name in DCP, which joins the text of the keys with dots."""
    names = [".".join(map(str, path)) for path in paths]
    counts = Counter(names)
    parents = {path[:length] for path in paths for length in range(1, len(path))}
    for path, name in zip(paths, names, strict=True):
        if counts[name] > 1 or path in parents:
            hint = "use keys with different text, such as 0 and '00' instead of 0 and '0'"
            raise Unsupported("two tensors have keys of the same text", tensor=name, hint=hint)


def replace_tensors_with_paths(value: Any, key_path: KeyPath, tensors: list[tuple[KeyPath, Tensor]]) -> Any:
    """Return a nested value with each tensor replaced by its key path, and add the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append((key_path, value.detach()))
        return {_NAME: list(key_path)}
    return map_members(value, lambda key, member: replace_tensors_with_paths(member, (*key_path, str(key)), tensors))


def replace_paths_with_tensors(value: Any, load: Callable[[tuple[str, ...]], Tensor]) -> Any:
    """Undo `replace_tensors_with_paths`: return a value with the tensor that `load` returns for each key path."""
    if isinstance(value, dict) and value.keys() == {_NAME}:
        return load(tuple(value[_NAME]))
    return map_members(value, lambda _key, member: replace_paths_with_tensors(member, load))


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
