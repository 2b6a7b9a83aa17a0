"""Storage: the bridge to torch.distributed.checkpoint, which loads any layout through it. Knows no format and no model.

`dcp.load(tensors, storage_reader=LayoutReader(layout))` loads Hugging Face's files, a DCP directory of any world size
or a torch.save file into plain tensors and DTensors, each rank reading its own part of them and no more.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ckptkit import edits
from ckptkit.box import Box, BoxIndex, Shape
from ckptkit.dtypes import DTYPES, DType
from ckptkit.errors import CkptError, Mismatch, Unsupported, Usage
from ckptkit.execute import Block, Sources, blocks, fill
from ckptkit.formats import locate, open_layout
from ckptkit.gather import BLOCK_BYTES, Gatherer
from ckptkit.layout import Chunk, Layout, Piece, Spec, StoredTensor
from ckptkit.ops.weights import find_weights
from ckptkit.plan import Plan, make_plan

T = TypeVar("T")


class LayoutReader(StorageReader):
    """Reads the tensors of a layout, edited or as it was opened, into tensors of the same names and shapes.

    Floats of 16 bits and more are converted to the dtype of the tensor they are read into. A chunk that a rank reads
    whole is compared with its recorded CRC-32, and `Corrupt` raised if it differs. Of a chunk that is read in part, as
    when the world size changes, or that has its elements in another order, the CRC-32 says nothing.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew. Raises `Usage` for an id: what is read is the layout."""
        if checkpoint_id is not None:
            raise Usage("a reader of a layout takes no checkpoint id", path=checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Every tensor as one chunk: of which pieces it is made is the layout's business, not the planner's."""
        tensors = {name: describe(tensor.spec) for name, tensor in self.layout.tensors.items()}
        return Metadata(dict(tensors), planner_data={name: self.layout.key(name) for name in tensors})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: no rank needs another."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of this rank's plan into its tensor, in the order in which they lie in the files."""
        in_order = sorted(plan.items, key=self._place)
        items = {f"{position:08d}": item for position, item in enumerate(in_order)}
        tensors = {label: planner.resolve_tensor(item).detach() for label, item in items.items()}
        wanted = self._wanted(items, tensors)
        copies = make_plan(locate(part_of(self.layout, wanted)), wanted)
        sources = Sources(copies)
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        with Gatherer(copies.src.root) as gatherer:
            for target in copies.targets:
                label = target.chunk.path
                for block in blocks(Plan(copies.src, wanted, (target,))):
                    sources.note(fill_tensor(gatherer, block, tensors[label], buffer))
                planner.commit_tensor(items[label], tensors[label])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: no id leads to a layout."""
        return False

    def _place(self, item: ReadItem) -> tuple[str, int]:
        first = self.layout.tensors[item.storage_index.fqn].chunks[0]
        return first.path, first.offset

    def _wanted(self, items: Mapping[str, ReadItem], tensors: Mapping[str, Tensor]) -> Layout:
        """The tensors to be filled, as a layout whose files are the items."""
        chunks: dict[str, list[Chunk]] = {}
        for label, item in items.items():
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            dtype = dtype_of(tensors[label], item.storage_index.fqn)
            chunk = Chunk(box, label, 0, box.numel * dtype.itemsize, dtype)
            chunks.setdefault(item.storage_index.fqn, []).append(chunk)
        return Layout(
            self.layout.root,
            "memory",
            {
                name: StoredTensor(Spec(parts[0].dtype, self.layout.tensors[name].spec.shape), tuple(parts))
                for name, parts in chunks.items()
            },
        )


def describe(spec: Spec) -> TensorStorageMetadata:
    """A tensor as torch's planner is told of it: in one piece."""
    size = torch.Size(spec.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, spec.dtype.name)), size, [chunk])


def dtype_of(tensor: Tensor, name: str) -> DType:
    """The dtype of a tensor of torch's."""
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise Unsupported(f"no checkpoint of ours holds dtype {tensor.dtype}", tensor=name)
    return dtype


def part_of(layout: Layout, wanted: Layout) -> Layout:
    """What of a layout `wanted` is made of: those tensors, of them those chunks, and in its dtypes where floats are."""

    def wanted_dtype(name: str, spec: Spec) -> DType:
        dtype = wanted.tensors[name].spec.dtype
        return dtype if spec.dtype.can_become(dtype) else spec.dtype

    tensors = {
        name: replace(layout.tensors[name], chunks=chunks_meeting(layout.tensors[name], tensor.chunks))
        for name, tensor in wanted.tensors.items()
    }
    return edits.cast(replace(layout, tensors=tensors, blobs={}, keys={}), wanted_dtype)


def chunks_meeting(tensor: StoredTensor, wanted: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """The chunks of a tensor that have elements in any of the wanted ones."""
    index = BoxIndex([chunk.box for chunk in tensor.chunks])
    found = {i for chunk in wanted for i, _ in index.meeting(chunk.box)}
    return tuple(tensor.chunks[i] for i in sorted(found))


def fill_tensor(gatherer: Gatherer, block: Block, tensor: Tensor, buffer: Tensor) -> list[Piece]:
    """Read a block into its place in a tensor: straight there if the tensor is contiguous memory of the CPU."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return fill(gatherer, block, bytes_of(tensor)[block.start : block.start + block.nbytes])
    raw = buffer[: block.nbytes]
    pieces = fill(gatherer, block, bytes_of(raw))
    place = tensor
    inner = block.box.relative_to(block.target.chunk.box)
    for axis, (start, size) in enumerate(zip(inner.start, inner.size, strict=True)):
        place = place.narrow(axis, start, size)
    place.copy_(raw.view(tensor.dtype).view(inner.size))
    return pieces


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def load_weights(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Load the model of the checkpoint at `path`, of any format, into `tensors` in place; names as the model has them.

    Plain tensors or DTensors, on any device. A name that the checkpoint lacks may be missing if a tensor with the same
    memory, one that it is tied to, is there. Returns the names of the checkpoint's weights that were not asked for.

    With torch.distributed initialised every rank must call it, and an error of one is raised on all: `Mismatch` for a
    tensor that is missing or has another shape or an unlike dtype, whatever reading the checkpoint raises else.
    """
    layout = on_every_rank(lambda: find_fitting(path, tensors))
    wanted = {name: tensor for name, tensor in tensors.items() if name in layout.tensors}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(wanted, storage_reader=LayoutReader(layout))
    except CheckpointException as error:
        raise root_cause(error, path) from error
    return tuple(name for name in layout.tensors if name not in tensors)


def find_fitting(path: Path, tensors: Mapping[str, Tensor]) -> Layout:
    """The weights of the checkpoint at `path`. Raises `Mismatch` unless they have the names and shapes of `tensors`."""
    layout = find_weights(open_layout(path)).layout
    loaded = {memory_of(tensor) for name, tensor in tensors.items() if name in layout.tensors}
    missing = [name for name, t in tensors.items() if name not in layout.tensors and memory_of(t) not in loaded]
    if missing:
        raise Mismatch(
            f"the checkpoint lacks {len(missing)} of the model's {len(tensors)} tensors",
            path=path,
            tensor=missing[0],
            hint="is this a checkpoint of the same model?",
        )
    for name, tensor in tensors.items():
        shape = layout.tensors[name].spec.shape if name in layout.tensors else tuple(tensor.shape)
        if shape != tuple(tensor.shape):
            message = f"the checkpoint has shape {list(shape)}, the model {list(tensor.shape)}"
            raise Mismatch(message, path=path, tensor=name, hint="is this a checkpoint of the same model?")
    return layout


def memory_of(tensor: Tensor) -> tuple[int, Shape]:
    """What tied tensors have in common: where their elements lie, and their shape."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), tuple(tensor.shape)


def on_every_rank(work: Callable[[], T]) -> T:
    """Do `work` on this rank, as all do; a CkptError of any is raised on every one."""
    if not dist.is_initialized():
        return work()
    outcome: T | CkptError
    try:
        outcome = work()
    except CkptError as error:
        outcome = error
    failures: list[CkptError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, outcome if isinstance(outcome, CkptError) else None)
    for failure in failures:
        if failure is not None:
            raise failure
    assert not isinstance(outcome, CkptError)
    return outcome


def root_cause(error: CheckpointException, path: Path) -> BaseException:
    """What stopped the first of the ranks that failed to load `path`; a CkptError before any other."""
    reasons = [reason for _, (reason, _) in sorted(error.failures.items())]
    ours = next((reason for reason in reasons if isinstance(reason, CkptError)), None)
    return reasons[0] if ours is None else ours.blame(path=path)
