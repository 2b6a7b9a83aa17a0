"""Save and load the checkpoints of Lightning's Trainer by ckptkit's writer and reader.

Trainer(..., plugins=[CkptkitIO()])

A checkpoint is a directory of DCP: each tensor by itself, with its CRC-32, and each other thing that Lightning saves as
an entry of its name. What holds both, as the states of optimizers, lies there twice: its tensors by their way in it,
and its form, with names in their place, in one entry for all.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
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
from ckptkit.formats import unpack
from ckptkit.io.path import to_local
from ckptkit.layout import Layout
from ckptkit.runs.deletion import delete, deleting
from ckptkit.runs.keeper import find_holds
from ckptkit.storage.entries import find_archive, read_value
from ckptkit.storage.ranks import translate
from ckptkit.storage.writer import Writer

FORM = "ckptkit_form"  # the entry that says where in what Lightning saves the tensors belong
_NAME = "ckptkit.tensor"  # the only key of a dict that stands for the tensor of a name
_PATIENCE = 10.0  # seconds that a deletion waits for others to end theirs


class CkptkitIO(TorchCheckpointIO):
    """A plugin by which Lightning saves checkpoints that appear whole or not at all, with a checksum of each tensor.

    Rank 0 saves all there is. Strategies that save shards do that without a plugin, and if they save a whole model
    instead, it becomes Lightning's own file, since they load nothing else. Files that Lightning itself saved are loaded
    too. A checkpoint that is pinned, or that a watch is handling, is not removed by `save_top_k`.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint to directory `path`, in the place of what is there. Raises a `CkptError`."""
        if storage_options is not None:
            raise Usage("storage options are not supported: the plugin writes to local directories")
        if FORM in checkpoint:
            raise Usage(f"`{FORM}` is a name of ckptkit's own")
        place = to_local(path)
        if isinstance(strategy_at_work(), FSDPStrategy | ModelParallelStrategy):
            words = "one file of Lightning's own, without checksums: of whole models this strategy loads nothing else"
            warn(f"{place} is {words}")
            super().save_checkpoint(checkpoint, place)
            return
        tensors: dict[str, Any] = {}
        form: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for key, value in checkpoint.items():
            found = dict(tensors_in(value))
            if found:
                tensors[key] = nest(found)
                form[key] = with_names(value, (key,))
            else:
                others[key] = (value,)  # in a tuple DCP takes nothing apart
        try:
            dcp.save(
                {**tensors, **others, FORM: (form,)}, storage_writer=Writer(place, "dcp", overwrite=True), no_dist=True
            )
        except CheckpointException as error:
            raise translate(error, place, "save") from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what was saved to `path`, each tensor compared with its CRC-32.

        Raises `Corrupt` for one that differs, and `Unsupported` for other things than torch loads with `weights_only`,
        unless that is False.
        """
        if Path(path).is_file():
            return super().load_checkpoint(Path(path), map_location, weights_only)
        layout = unpack(Checkpoint.open(path).layout)
        read = read_anything if weights_only is False else read_value
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
        """Remove a checkpoint, out of sight first, unless it is pinned or a watch is handling it."""
        place = Path(path)
        if not place.is_dir():
            super().remove_checkpoint(place)
            return
        with deleting(place.parent, patience=_PATIENCE):
            if not find_holds(place):
                delete(place)


def as_file(path: str | os.PathLike[str], weights_only: bool | None = None) -> BytesIO:
    """Return a checkpoint as Lightning's own file, in memory: `MyModule.load_from_checkpoint(as_file(path))`.

    Needs memory for two copies of the checkpoint. Raises the same errors as `CkptkitIO.load_checkpoint`.
    """
    file = BytesIO()
    torch.save(CkptkitIO().load_checkpoint(path, weights_only=weights_only), file)
    file.seek(0)
    return file


def strategy_at_work() -> Strategy | None:
    """Return the strategy that is calling, which Lightning does not tell its plugins; None if it is no strategy."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Strategy):
            return caller
        frame = frame.f_back
    return None


def read_anything(layout: Layout, name: str) -> BytesIO:
    """Return an entry as it was saved, which may call for code when it is loaded."""
    blob = layout.blobs[name]
    return BytesIO(find_archive(blob, layout.root / blob.path))


def tensors_in(value: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors in a tree of dicts, lists and tuples, each with the way to it."""
    if isinstance(value, Tensor):
        yield way, value.detach()
    for key, inside in steps_of(value):
        yield from tensors_in(inside, (*way, str(key)))


def steps_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what is directly in a dict, a list or a tuple, by key or number; nothing for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if type(value) in (list, tuple) else []


def nest(found: Mapping[tuple[str, ...], Tensor]) -> Any:
    """Return tensors as a tree of dicts, by the ways to them."""
    if () in found:
        return found[()]
    inside: dict[str, dict[tuple[str, ...], Tensor]] = {}
    for (first, *rest), tensor in found.items():
        inside.setdefault(first, {})[tuple(rest)] = tensor
    return {key: nest(tensors) for key, tensors in inside.items()}


def with_names(value: Any, way: tuple[str, ...]) -> Any:
    """Return a tree with the way to it in the place of each tensor."""
    if isinstance(value, Tensor):
        return {_NAME: list(way)}
    return rebuild(value, lambda key, inside: with_names(inside, (*way, str(key))))


def with_tensors(value: Any, load: Callable[[tuple[str, ...]], Tensor]) -> Any:
    """Return a tree with the tensors again that ways to them stand for."""
    if isinstance(value, dict) and value.keys() == {_NAME}:
        return load(tuple(value[_NAME]))
    return rebuild(value, lambda _key, inside: with_tensors(inside, load))


def rebuild(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a dict, list or tuple with everything in it changed; anything else as it is."""
    if isinstance(value, Mapping):
        return type(value)((key, change(key, inside)) for key, inside in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(change(key, inside) for key, inside in enumerate(value))
    return value
