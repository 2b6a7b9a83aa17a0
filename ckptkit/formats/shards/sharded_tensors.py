"""Read ShardedTensors as torch pickles them: the shards that a rank holds, and where each belongs, which they say.

Source: torch/distributed/_shard/{sharded_tensor/api,sharded_tensor/shard,metadata}.py, `ShardedTensor.__getstate__`:
the local shards, the metadata of all shards, the process group's state, the sharding spec, and a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.zip_entries import ZipEntry
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.tensor_calls import TensorRecord, as_shape, as_tensor
from ckptkit.formats.shards.dtensors import attributes_of, chunk_of
from ckptkit.layout import Chunk, Spec
from ckptkit.layout.box import Box, Shape

_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
_ROOM = "torch.distributed._shard"


class ShardedTensor(NamedTuple):
    """A tensor of which each rank holds shards: its own, and the box of each rank's, in the order of `ranks`."""

    spec: Spec
    held: tuple[tuple[Box, TensorRecord], ...]
    boxes: tuple[Box, ...]
    ranks: tuple[int | None, ...]


def is_sharded_tensor(value: Any) -> bool:
    """Return True for a pickled ShardedTensor."""
    match value:
        case Record(of=of, args=(_, Global() as kind, *_)) if of == _REBUILD:
            return kind.name == "ShardedTensor" and kind.module.startswith(_ROOM)
    return False


def open_sharded(value: Record) -> ShardedTensor:
    """Return the tensor that a pickled ShardedTensor would have been."""
    try:
        shards, metadata, *_ = value.args[3]
        described = attributes_of(metadata)
        shape = as_shape(described["size"])
        every = [box_and_rank(one) for one in described["shards_metadata"]]
        held = tuple(open_shard(attributes_of(shard)) for shard in shards)
        dtype = held[0][1].dtype if held else as_tensor_dtype(value)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("the pickle describes a ShardedTensor in an unknown way") from error
    return ShardedTensor(Spec(dtype, shape), held, tuple(box for box, _ in every), tuple(rank for _, rank in every))


def as_tensor_dtype(value: Record) -> Any:
    """Return the dtype in the call that makes a tensor of which this rank has no shard."""
    from ckptkit.layout.dtypes import DTYPES

    return DTYPES[value.args[2][1].name]


def open_shard(shard: Mapping[str, Any]) -> tuple[Box, TensorRecord]:
    """Return the box of a shard, and the tensor that it is."""
    box, _ = box_and_rank(shard["metadata"])
    held = as_tensor(shard["tensor"])
    if prod(held.shape) != box.numel or (held.shape != box.size and box.numel):
        raise Corrupt(f"expected a shard of shape {list(box.size)}, found {list(held.shape)}")
    return box, held


def box_and_rank(metadata: Record) -> tuple[Box, int | None]:
    """Return the box of a shard, and the rank that holds it if that is said."""
    state = attributes_of(metadata)
    box = Box(as_shape(state["shard_offsets"]), as_shape(state["shard_sizes"]))
    if len(box.start) != len(box.size):
        raise ValueError("shard")
    placement = state.get("placement")
    rank = attributes_of(placement).get("_rank") if isinstance(placement, Record) else None
    return box, rank if type(rank) is int else None


def chunks_of_shards(sharded: ShardedTensor, entries: Mapping[str, ZipEntry], path: str) -> list[Chunk]:
    """Return where each shard lies that a rank holds, in file `path` with these entries."""
    return [shard_chunk(box, held, entries, path) for box, held in sharded.held]


def shard_chunk(box: Box, held: TensorRecord, entries: Mapping[str, ZipEntry], path: str) -> Chunk:
    zeros: Shape = (0,) * len(box.size)
    return chunk_of(held if held.shape == box.size else empty_like(held, box), box, zeros, entries, path)


def empty_like(held: TensorRecord, box: Box) -> TensorRecord:
    """Return a tensor without elements in the shape of its box: torch may have given it another."""
    return TensorRecord(held.key, held.dtype, held.offset, box.size, (1,) * len(box.size))
