"""Join the shards of each tensor from all ranks. Reads no data.

DTensors and ShardedTensors say how they are sharded. The files of tensor-parallel ranks do not: a column-parallel layer
has rows of its weight on each rank, a row-parallel layer has columns, a norm is replicated. So each name needs a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, raise_problem
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.rank_file import RankFile, RankTensor, ShardedTensor
from ckptkit.layout import OWN, Chunk, StoredTensor
from ckptkit.layout.axes import concatenate, narrow_axis, replace_sizes_at
from ckptkit.layout.box import Box

# buffers that differ between ranks: statistics of the data that a rank has seen
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def join_files(files: Sequence[RankFile], report: Report = raise_problem) -> FlatState:
    """Return the joined entries of all ranks. Replicas are spares, blobs that differ become one per rank."""
    by_rank = {file.rank: file.tensors for file in files}
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(name for file in files for name in file.flat.tensors):
        parts = {rank: own[name] for rank, own in by_rank.items() if name in own}
        try:
            tensors[name] = join_rank_tensors(name, parts, report)
        except CkptError as error:
            report(error.blame(tensor=name))
    every = {name: key for file in reversed(files) for name, key in file.flat.keys.items()}
    spares: dict[str, list[Chunk]] = {}
    # the statistics of other ranks are no replicas
    chosen = {name: set(tensor.chunks) for name, tensor in tensors.items() if not name.endswith(STATISTICS)}
    for file in files:
        for name, held in file.tensors.items():
            if name in chosen:
                spares.setdefault(name, []).extend(chunk for chunk in held.chunks if chunk not in chosen[name])
    replicas = {name: tuple(chunks) for name, chunks in spares.items() if chunks}
    joined = FlatState(tensors, {}, {name: every[name] for name in tensors}, replicas)
    for name in dict.fromkeys(name for file in files for name in file.flat.blobs):
        blobs = {file.rank: file.flat.blobs[name] for file in files if name in file.flat.blobs}
        if len({blob.content for blob in blobs.values()}) == 1:
            joined.put(every[name], next(iter(blobs.values())))
        else:
            for rank, blob in blobs.items():
                joined.put((OWN, f"rank_{rank}", *every[name]), blob)
    return joined


def join_rank_tensors(name: str, tensor_by_rank: Mapping[int, RankTensor], report: Report) -> StoredTensor:
    """Return one tensor with all ranks' chunks. Raises `Unsupported` if plain copies differ, unless of statistics."""
    first, tensor = next(iter(tensor_by_rank.items()))
    for rank, other in tensor_by_rank.items():
        if other.spec != tensor.spec or type(other.spread) is not type(tensor.spread):
            kinds = {Placed: "a DTensor", ShardedTensor: "a ShardedTensor"}
            expected, found = (f"{kinds.get(type(one.spread), 'a plain tensor')} {one.spec}" for one in (tensor, other))
            message = f"expected {expected} as on rank {first}, found {found} on rank {rank}"
            raise Corrupt(message, hint="check that all files come from one run")
    if isinstance(tensor.spread, Placed):
        chunks = join_dtensor_chunks(name, tensor_by_rank, tensor.spread, report)
        return StoredTensor(tensor.spec, first_chunk_of_each_box(chunks))
    if isinstance(tensor.spread, ShardedTensor):
        check_shards_agree(name, tensor_by_rank, tensor.spread, report)
        return StoredTensor(
            tensor.spec, first_chunk_of_each_box(chunk for other in tensor_by_rank.values() for chunk in other.chunks)
        )
    for rank, other in tensor_by_rank.items():
        if not name.endswith(STATISTICS):
            require_equal_replicas(first, tensor, rank, other)
    return StoredTensor(tensor.spec, tensor.chunks)


def join_dtensor_chunks(
    name: str, tensor_by_rank: Mapping[int, RankTensor], reference: Placed, report: Report
) -> Iterable[Chunk]:
    """Yield a DTensor's chunks without replicas, in the order of the mesh. Ranks outside the mesh have replicas."""
    for rank, other in tensor_by_rank.items():
        spread = other.spread
        assert isinstance(spread, Placed)
        own = (spread.mesh.shape, spread.placements, spread.order)
        wanted = (reference.mesh.shape, reference.placements, reference.order)
        if own != wanted:
            first = min(tensor_by_rank)
            message = f"expected the placements of rank {first}, found others on rank {rank}"
            if own[0] != wanted[0]:
                expected = f"expected a mesh of {list(wanted[0])} as on rank {first}"
                message = f"{expected}, found {list(own[0])} on rank {rank}"
            raise Corrupt(message, hint="check that all files come from one run")
    missing = [rank for rank in reference.mesh.ranks if rank not in tensor_by_rank]
    if missing:
        message = f"expected a shard from each of {len(reference.mesh.ranks)} ranks, found none from rank {missing[0]}"
        hint = "check that no file is missing or from another run"
        report(Incomplete(message, tensor=name, hint=hint, ranks=missing))
    first_rank = {}
    for rank in (rank for rank in reference.mesh.ranks if rank in tensor_by_rank):
        spread = tensor_by_rank[rank].spread
        assert isinstance(spread, Placed)
        first_rank[spread.mesh.coordinate] = rank
        if not spread.is_replica_of_lower_rank:
            yield from tensor_by_rank[rank].chunks
    for rank, other in tensor_by_rank.items():
        if rank not in reference.mesh.ranks:
            assert isinstance(other.spread, Placed)
            same = first_rank.get(other.spread.mesh.coordinate)
            if same is not None:
                require_equal_replicas(same, tensor_by_rank[same], rank, other)


def require_equal_replicas(rank: int, tensor: RankTensor, other_rank: int, other_tensor: RankTensor) -> None:
    """Raise `Unsupported` if checksums show that replicas differ. Those of storages with other tensors do not count."""
    for chunk, replica in zip(tensor.chunks, other_tensor.chunks, strict=True):
        is_comparable = None not in (chunk.crc32, replica.crc32) and chunk.run is None
        if is_comparable and chunk.crc32 != replica.crc32:
            message = f"the values differ between ranks {rank} and {other_rank}, and no file says how to join them"
            hint = "check whether the tensor is local to each rank, like experts or pipeline stages"
            raise Unsupported(message, hint=hint)


def check_shards_agree(
    name: str, tensor_by_rank: Mapping[int, RankTensor], reference: ShardedTensor, report: Report
) -> None:
    """Raise `Corrupt` unless all ranks agree on all boxes, and each has one of them; report a missing rank."""
    for rank, other in tensor_by_rank.items():
        spread = other.spread
        assert isinstance(spread, ShardedTensor)
        if spread.boxes != reference.boxes:
            expected = f"expected the list of {len(reference.boxes)} shards that rank {min(tensor_by_rank)} has"
            message = f"{expected}, found another list of {len(spread.boxes)} on rank {rank}"
            raise Corrupt(message, hint="check that all files come from one run")
        if not {chunk.box for chunk in other.chunks} <= set(reference.boxes):
            raise Corrupt(f"rank {rank} has a shard that the list of all shards does not contain")
    beyond = [rank for rank in reference.ranks if rank is not None and rank not in tensor_by_rank]
    if beyond:
        message = f"expected a shard from each of {len(reference.ranks)} ranks, found none from rank {beyond[0]}"
        hint = "check that no file is missing or from another run"
        report(Incomplete(message, tensor=name, hint=hint, ranks=beyond))


def first_chunk_of_each_box(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Return the first chunk of each box, and one of the empty chunks."""
    by_box: dict[Box | None, Chunk] = {}
    for chunk in chunks:
        by_box.setdefault(chunk.box if chunk.box.numel else None, chunk)
    return tuple(by_box.values())


@dataclass(frozen=True, slots=True)
class JoinRule:
    """How ranks share a tensor: sharded along `axis`, or replicated if `axis` is None.

    With `sections` each shard consists of equal sections along the axis, such as gate and up projection, and the full
    tensor has all shards of the first section, then all of the second. `extents` gives sections of different lengths.
    """

    axis: int | None
    sections: int = 1
    extents: tuple[int, ...] = ()


COPIED = JoinRule(None)
BY_ROWS = JoinRule(0)
BY_COLUMNS = JoinRule(1)
BY_HALVES = JoinRule(0, sections=2)

JoinRules = Sequence[tuple[str, JoinRule]]  # patterns of full names; the first match counts


def require_join_rule(name: str, rules: JoinRules, world_size: int) -> JoinRule:
    """Return the rule for a tensor. Raises `Unsupported` without a rule: ckptkit does not guess."""
    found = next((rule for pattern, rule in rules if re.fullmatch(pattern, name)), None)
    if found is None:
        hint = "report the tensor's name as an issue; to open one rank's file, copy it under a name without a number"
        raise Unsupported(
            f"there is no rule for how the tensor is split over {world_size} ranks", tensor=name, hint=hint
        )
    return found


def join_by_rule(shards: Sequence[StoredTensor], rule: JoinRule) -> StoredTensor:
    """Return the tensor from the ranks' shards, in order. Raises `Corrupt` where they do not fit together."""
    if rule.axis is None:
        return first_readable_replica(shards)
    first = shards[0].spec
    rest = replace_sizes_at(first.shape, rule.axis, 1, ())
    for shard in shards[1:]:
        if shard.spec.dtype != first.dtype or replace_sizes_at(shard.spec.shape, rule.axis, 1, ()) != rest:
            raise Corrupt(f"expected a tensor that fits {first} of another rank, found {shard.spec}")
    if len(first.shape) <= rule.axis:
        why = f"because the ranks split axis {rule.axis}"
        raise Corrupt(f"expected at least {rule.axis + 1} axes, {why}; found {first}")
    cut_shards = []
    for shard in shards:
        extents = rule.extents or (shard.spec.shape[rule.axis] // rule.sections,) * rule.sections
        if sum(extents) != shard.spec.shape[rule.axis]:
            parts = f"parts of {', '.join(map(str, rule.extents))}" if rule.extents else f"{rule.sections} equal parts"
            raise Corrupt(f"expected {parts} along axis {rule.axis}, found {shard.spec}")
        ends = pairwise((0, *accumulate(extents)))
        cut_shards.append([narrow_axis(shard, rule.axis, start, stop) for start, stop in ends])
    joined = concatenate(list(chain.from_iterable(zip(*cut_shards, strict=True))), rule.axis)
    return replace(joined, chunks=tuple(chunk for chunk in joined.chunks if chunk.box.numel))


def first_readable_replica(replicas: Sequence[StoredTensor]) -> StoredTensor:
    """Return the copy of the first rank whose file can be read. Raises `Corrupt` if dtype or shape differ."""
    for copy in replicas[1:]:
        if copy.spec != replicas[0].spec:
            raise Corrupt(f"expected {replicas[0].spec} as on another rank, found {copy.spec}")
    return next((copy for copy in replicas if not copy.is_unreadable), replicas[0])


def replica_chunks_of(tensor: StoredTensor, shards: Sequence[StoredTensor]) -> tuple[Chunk, ...]:
    """Return the chunks of the other replicas if a joined tensor is one of the ranks' copies, else ()."""
    if not any(tensor is copy for copy in shards):
        return ()
    return tuple(chunk for copy in shards if copy is not tensor for chunk in copy.chunks)


def as_unreadable_tensors(flat: FlatState, path: str) -> FlatState:
    """Return the tensors that a rank's unreadable file must have had, derived from another rank's file."""
    lost = {
        name: replace(tensor, chunks=tuple(Chunk.unreadable(chunk.box, path, chunk.dtype) for chunk in tensor.chunks))
        for name, tensor in flat.tensors.items()
    }
    return FlatState(lost, {}, flat.keys)
