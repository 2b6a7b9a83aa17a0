"""Read the tensors in one rank's file: plain tensors, DTensors, and ShardedTensors as torch pickles them.

Source: torch/distributed/_shard/{sharded_tensor/api,sharded_tensor/shard,metadata}.py, `ShardedTensor.__getstate__`:
the local shards, the metadata of all shards, the process group's state, the sharding spec, and a flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.archives.flatten import FlatState, Flattening, find_dict_items
from ckptkit.formats.archives.torch_save import read_state_file
from ckptkit.formats.archives.zip_entries import ZipEntry, locate_storage_of
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.pickles.tensor_calls import TensorRecord, as_shape, as_tensor_record, is_pickled_tensor_of_class
from ckptkit.formats.shards.dtensors import Placed, Specs, is_pickled_dtensor, pickled_attributes_of
from ckptkit.io.file import opening, read_at
from ckptkit.layout import Chunk, KeyPath, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DTYPES

_MOST_INTEGERS = 1 << 20  # bytes of a mesh's tensor of ranks


@dataclass(frozen=True, slots=True)
class RankTensor(StoredTensor):
    """A tensor as one rank has it: the chunks in its file, and how it is sharded over ranks; None if it is not."""

    spread: Placed | ShardedTensor | None = None


@dataclass(frozen=True)
class RankFile:
    """The state dict in the file of one rank: flattened, and as it was pickled."""

    rank: int
    name: str
    flat: FlatState
    value: Any

    @cached_property
    def tensors(self) -> Mapping[str, RankTensor]:
        return {name: tensor for name, tensor in self.flat.tensors.items() if isinstance(tensor, RankTensor)}


class _RankFlattening(Flattening):
    """Collects the entries of one rank's file."""

    def __init__(self, root: Path, rank: int, entries: Mapping[str, ZipEntry], path: str) -> None:
        super().__init__(entries, path)
        self.root = root
        self.specs = Specs(rank, self.read_integers)

    def make_stored_tensor(self, value: Any) -> StoredTensor:
        if is_pickled_dtensor(value):
            placed = self.specs.read_dtensor(value)
            parts = ((placed.held, piece.box, piece.at) for piece in placed.placed_boxes)
            return RankTensor(placed.spec, self.chunks_of(parts), spread=placed)
        if is_pickled_tensor_of_class(value, "ShardedTensor", "torch.distributed._shard"):
            sharded = read_sharded_tensor(value)
            zeros = (0,) * len(sharded.spec.shape)
            parts = ((tensor, box, zeros) for box, tensor in sharded.held)
            return RankTensor(sharded.spec, self.chunks_of(parts), spread=sharded)
        plain = super().make_stored_tensor(value)
        return RankTensor(plain.spec, plain.chunks)

    def chunks_of(self, parts: Iterable[tuple[TensorRecord, Box, Shape]]) -> tuple[Chunk, ...]:
        """Return the location of each part: a box that begins at an index of a local tensor."""
        chunks = []
        for local, box, at in parts:
            start = local.offset + sum(i * stride for i, stride in zip(at, local.strides, strict=True))
            record = TensorRecord(local.key, local.dtype, start, box.size, local.strides)
            chunks.append(locate_storage_of(record, self.entries).as_chunk(box, self.path))
        return tuple(chunks)

    def read_integers(self, value: Any) -> list[int]:
        """Return the numbers in a small tensor of integers, row by row."""
        located = locate_storage_of(as_tensor_record(value), self.entries)
        size = located.tensor.dtype.itemsize
        if located.strides is not None or located.length > _MOST_INTEGERS or located.tensor.dtype.kind != "int":
            raise ValueError("mesh")
        with opening(self.root / self.path) as file:
            data = read_at(file, located.length, located.offset)
        return [int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size)]


def read_rank_file(root: Path, name: str, rank: int, key_prefix: KeyPath, *, must_be_dict: bool = True) -> RankFile:
    """Return the contents of a rank's file, with key paths that begin with `key_prefix`. Every error names the file.

    The file must contain a dict, unless `must_be_dict` is false: then it may be a single entry, at `key_prefix` itself.
    """
    state = read_state_file(root, name)
    with errors_at(path=root / name):
        holding = _RankFlattening(root, rank, state.entries, name)
        if must_be_dict or find_dict_items(state.value) == []:
            holding.add_children(holding.members(state.value), key_prefix)
        else:
            holding.add_nested(state.value, key_prefix)
    return RankFile(rank, name, holding.flat, state.value)


def infer_lost_rank_file(like: RankFile, rank: int, name: str) -> RankFile:
    """Return the DTensors that a rank's unreadable file must have had, derived from another rank's file."""
    tensors: dict[str, StoredTensor] = {}
    for own, tensor in like.tensors.items():
        if isinstance(tensor.spread, Placed) and rank in tensor.spread.mesh.ranks:
            placed = tensor.spread.as_seen_by_rank(rank)
            chunks = (Chunk.unreadable(box, name, tensor.spec.dtype) for box, _ in placed.placed_boxes)
            tensors[own] = RankTensor(tensor.spec, tuple(chunks), spread=placed)
    return RankFile(rank, name, FlatState(tensors, {}, like.flat.keys), None)


class ShardedTensor(NamedTuple):
    """A tensor sharded over ranks: this rank's shards, and the box of each rank's shard, in the order of `ranks`."""

    spec: Spec
    held: tuple[tuple[Box, TensorRecord], ...]
    boxes: tuple[Box, ...]
    ranks: tuple[int | None, ...]


def read_sharded_tensor(value: Record) -> ShardedTensor:
    try:
        shards, metadata, *_ = value.args[3]
        described = pickled_attributes_of(metadata)
        shape = as_shape(described["size"])
        every = [box_and_rank(one) for one in described["shards_metadata"]]
        own_shards = tuple(read_shard(pickled_attributes_of(shard)) for shard in shards)
        # a rank may have no shard
        dtype = own_shards[0][1].dtype if own_shards else DTYPES[value.args[2][1].name]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("the pickle describes a ShardedTensor in an unknown way") from error
    return ShardedTensor(
        Spec(dtype, shape), own_shards, tuple(box for box, _ in every), tuple(rank for _, rank in every)
    )


def read_shard(shard: Mapping[str, Any]) -> tuple[Box, TensorRecord]:
    box, _ = box_and_rank(shard["metadata"])
    tensor = as_tensor_record(shard["tensor"])
    if prod(tensor.shape) != box.numel or (tensor.shape != box.size and box.numel):
        raise Corrupt(f"expected a shard of shape {list(box.size)}, found {list(tensor.shape)}")
    # torch may have given an empty tensor another shape than its box
    return box, tensor if tensor.shape == box.size else replace(tensor, shape=box.size, strides=(1,) * len(box.size))


def box_and_rank(metadata: Record) -> tuple[Box, int | None]:
    """Return the box of a shard, and its rank if it is recorded."""
    state = pickled_attributes_of(metadata)
    box = Box(as_shape(state["shard_offsets"]), as_shape(state["shard_sizes"]))
    if len(box.start) != len(box.size):
        raise ValueError("shard")
    placement = state.get("placement")
    rank = pickled_attributes_of(placement).get("_rank") if isinstance(placement, Record) else None
    return box, rank if type(rank) is int else None
