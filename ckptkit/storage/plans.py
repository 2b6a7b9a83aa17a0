"""Interpret torch's save plans: what all ranks together will write, and the data of each item."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import PicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported
from ckptkit.layout import Blob, Chunk, Layout, Spec, StoredTensor, check_chunks_tile
from ckptkit.layout.box import Box
from ckptkit.storage.memory import require_known_dtype

T = TypeVar("T")


class PlannedWriter(StorageWriter):
    """A writer of a checkpoint that all ranks write together to `path`."""

    path: Path

    @classmethod
    def parse_id(cls, checkpoint_id: str | os.PathLike[str]) -> Path:
        """Return the destination that torch's checkpoint id means. Raises `CkptError` if the writer cannot write it."""
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the writer can write to a destination."""
        try:
            cls.parse_id(checkpoint_id)
        except (TypeError, CkptError):
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = self.parse_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise `Unsupported` for several ranks without collectives: they must coordinate to write one checkpoint."""
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            message = f"use_collectives=False: {dist.get_world_size()} ranks write the same files together"
            raise Unsupported(message, hint="drop it, or save with torch's FileSystemWriter, which ckptkit reads")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan. Raises `Unsupported` for a quantized tensor, which no format can store."""
        for item in split_tensors_and_entries(plan.items)[0]:
            dtype = spec_and_box_of_item(item)[0].dtype
            if dtype.kind == "quantized":
                message = f"a tensor of dtype {dtype} has its scales beside its bytes"
                hint = "save its `int_repr()` and its scales as tensors, or its `dequantize()`"
                raise Unsupported(message, tensor=item.index.fqn, hint=hint)
        return plan


def with_cached_plans(plans: list[SavePlan], root: Path) -> list[SavePlan]:
    """Return the plans of all ranks, with torch's cached plans for ranks whose plan did not change since the last save.

    torch caches plans by class of planner and passes on only changed plans (`enable_plan_caching`). Raises
    `Unsupported` if several planner classes have cached plans for this number of ranks: the right one is unknown.
    """
    if all(plan.usable for plan in plans):
        return plans
    cached: dict[str, list[SavePlan]] = getattr(SavePlanner, "_cached_global_plan", {})
    complete = [known for known in cached.values() if len(known) == len(plans)]
    if len(complete) != 1:
        hint = "pass enable_plan_caching=False to all planners but one"
        raise Unsupported(f"expected cached plans of 1 planner, found {len(complete)}", path=root, hint=hint)
    return [plan if plan.usable else known for plan, known in zip(plans, complete[0], strict=True)]


def layout_of_save_plans(plans: Iterable[SavePlan], root: Path) -> Layout:
    """Return the layout of what the ranks together will save; each chunk refers to a rank and the index of its item.

    Raises `Mismatch` if the ranks leave a gap, overlap or disagree.
    """
    specs: dict[str, Spec] = {}
    chunks: dict[str, list[Chunk]] = {}
    blobs: dict[str, Blob] = {}
    keys: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        keys |= plan.planner_data or {}
        for i, item in enumerate(plan.items):
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                # no file exists yet: the rank stands for the file, and the index of the item for the offset
                blobs[name] = Blob(f"rank {rank}", i, 0)
                continue
            spec, box = spec_and_box_of_item(item)
            if specs.setdefault(name, spec) != spec:
                raise Mismatch(
                    f"expected {specs[name]} as on another rank, found {spec} on rank {rank}", path=root, tensor=name
                )
            chunk = Chunk(box, f"rank {rank}", i, box.numel * spec.dtype.itemsize, spec.dtype)
            chunks.setdefault(name, []).append(chunk)
    tensors = {name: StoredTensor(spec, tuple(chunks[name])) for name, spec in specs.items()}
    layout = Layout(root, "memory", tensors, blobs, {name: keys[name] for name in (*tensors, *blobs) if name in keys})
    try:
        check_chunks_tile(layout)
    except Corrupt as error:
        hint = "check that all ranks that hold a part of it take part in the save"
        raise Mismatch(error.message, path=root, tensor=error.tensor, hint=hint) from None
    return layout


def spec_and_box_of_item(item: WriteItem) -> tuple[Spec, Box]:
    """Return the spec of an item's tensor, and the box of the tensor that the item contains."""
    data = item.tensor_data
    assert data is not None
    spec = Spec(require_known_dtype(data.properties.dtype, item.index.fqn), tuple(data.size))
    return spec, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def split_tensors_and_entries(items: Iterable[WriteItem]) -> tuple[list[WriteItem], list[WriteItem]]:
    """Return the items of tensors, and those of non-tensor entries."""
    tensors: list[WriteItem] = []
    entries: list[WriteItem] = []
    for item in items:
        (entries if item.type == WriteItemType.BYTE_IO else tensors).append(item)
    return tensors, entries


def written_entries(
    results: Iterable[WriteResult], planned: Layout, stored_names: Mapping[str, str] | None = None
) -> dict[str, Blob]:
    """Return the byte range of each planned non-tensor entry; `stored_names` maps names in the state to planned names.

    Raises `Corrupt` if one was not written.
    """
    entries = {result.index.fqn: result.storage_data for result in results if isinstance(result.storage_data, Blob)}
    if stored_names is not None:
        entries = {stored_names[name]: blob for name, blob in entries.items()}
    if entries.keys() != planned.blobs.keys():
        name = min(entries.keys() ^ planned.blobs.keys())
        raise Corrupt("the entry was not written by the rank that has it", path=planned.root, tensor=name)
    return {name: entries[name] for name in planned.blobs}


def completed_future(result: T) -> Future[T]:
    """Return a result in the form that torch expects from `write_data` and `read_data`."""
    done: Future[T] = Future()
    done.set_result(result)
    return done


def resolve_tensor(item: WriteItem, planner: SavePlanner) -> Tensor:
    """Return the data of a tensor item in the planned dtype, on any device. Converts a float if that loses nothing.

    Raises `Unsupported` for a tensor without plain dense data, `Mismatch` for another shape or dtype than planned.
    """
    tensor = planner.resolve_data(item)
    name = item.index.fqn
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise Unsupported("not a plain dense tensor with data", tensor=name)
    spec, box = spec_and_box_of_item(item)
    if tuple(tensor.shape) != box.size:
        raise Mismatch(f"expected {list(box.size)} as in the plan, found {list(tensor.shape)}", tensor=name)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    actual, dtype = require_known_dtype(tensor.dtype, name), getattr(torch, spec.dtype.name)
    if actual == spec.dtype:
        return tensor
    if actual.is_castable_to(spec.dtype) and torch.promote_types(tensor.dtype, dtype) == dtype:  # loses nothing
        return tensor.to(dtype)
    # the files have no room for its values
    hint = "let the planner set the dtype in `create_local_plan` as well as in `resolve_data`"
    raise Mismatch(f"expected dtype {spec.dtype} (the plan's), found {actual}", tensor=name, hint=hint)


def resolve_entry(item: WriteItem, planner: SavePlanner) -> memoryview:
    """Return the bytes of a non-tensor entry. Raises `Unsupported` if Python cannot pickle it, such as a lambda."""
    try:
        data = planner.resolve_data(item)
    except (PicklingError, AttributeError, TypeError) as error:
        raise Unsupported(f"entry `{item.index.fqn}` cannot be saved: {error}") from error
    assert not isinstance(data, Tensor)
    return data.getbuffer()
