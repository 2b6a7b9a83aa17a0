"""Join the shards of each tensor from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.sharded_tensors import RankFile, RankTensor, ShardedTensor
from ckptkit.layout import OWN, Chunk, StoredTensor
from ckptkit.layout.box import Box

# buffers that differ between ranks: statistics of the data that a rank has seen
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def join_files(files: Sequence[RankFile], report: Report = refuse) -> FlatState:
    """Return the joined entries of all ranks. Replicas are spares; entries that differ become one per rank."""
    tensors = join_tensors(files, report)
    every = {name: key for file in reversed(files) for name, key in file.flat.keys.items()}
    joined = FlatState(tensors, {}, {name: every[name] for name in tensors}, spares_of(files, tensors))
    for name in dict.fromkeys(name for file in files for name in file.flat.blobs):
        by_rank = {file.rank: file.flat.blobs[name] for file in files if name in file.flat.blobs}
        if len({blob.content for blob in by_rank.values()}) == 1:
            joined.put(every[name], next(iter(by_rank.values())))
        else:
            for rank, blob in by_rank.items():
                joined.put((OWN, f"rank_{rank}", *every[name]), blob)
    return joined


def join_tensors(files: Sequence[RankFile], report: Report = refuse) -> dict[str, StoredTensor]:
    """Return every tensor with the chunks of all ranks. Reports missing ranks, and tensors that do not fit together."""
    names = dict.fromkeys(name for file in files for name in file.flat.tensors)
    by_rank = {file.rank: file.tensors for file in files}
    joined = {}
    for name in names:
        parts = {rank: tensors[name] for rank, tensors in by_rank.items() if name in tensors}
        try:
            joined[name] = join_ranks(parts, naming(name, report), may_differ=name.endswith(STATISTICS))
        except CkptError as error:
            report(error.blame(tensor=name))
    return joined


def naming(name: str, report: Report) -> Report:
    return lambda problem: report(problem.blame(tensor=name))


def spares_of(files: Sequence[RankFile], joined: Mapping[str, StoredTensor]) -> dict[str, tuple[Chunk, ...]]:
    """Return the replicas of chunks in the joined tensors, except for statistics."""
    spares: dict[str, list[Chunk]] = {}
    chosen = {name: set(tensor.chunks) for name, tensor in joined.items() if not name.endswith(STATISTICS)}
    for file in files:
        for name, held in file.tensors.items():
            if name in chosen:
                spares.setdefault(name, []).extend(chunk for chunk in held.chunks if chunk not in chosen[name])
    return {name: tuple(chunks) for name, chunks in spares.items() if chunks}


def join_ranks(parts: Mapping[int, RankTensor], report: Report, *, may_differ: bool = False) -> StoredTensor:
    """Return one tensor with all ranks' chunks. Raises `Unsupported` if plain copies differ, unless `may_differ`."""
    first, tensor = next(iter(parts.items()))
    for rank, other in parts.items():
        if other.spec != tensor.spec or type(other.spread) is not type(tensor.spread):
            message = (
                f"expected {describe_part(tensor)} as on rank {first}, found {describe_part(other)} on rank {rank}"
            )
            raise Corrupt(message, hint="check that all files come from one run")
    if isinstance(tensor.spread, Placed):
        return StoredTensor(tensor.spec, unique_chunks(join_placed(parts, tensor.spread, report)))
    if isinstance(tensor.spread, ShardedTensor):
        check_same_shards(parts, tensor.spread, report)
        return StoredTensor(tensor.spec, unique_chunks(chunk for other in parts.values() for chunk in other.chunks))
    for rank, other in parts.items():
        if not may_differ:
            compare(first, tensor, rank, other)
    return StoredTensor(tensor.spec, tensor.chunks)


def describe_part(tensor: RankTensor) -> str:
    kinds = {Placed: "a DTensor", ShardedTensor: "a ShardedTensor"}
    return f"{kinds.get(type(tensor.spread), 'a plain tensor')} {tensor.spec}"


def join_placed(parts: Mapping[int, RankTensor], of_first: Placed, report: Report) -> Iterable[Chunk]:
    """Yield a DTensor's chunks without replicas, in the order of the mesh. Ranks outside the mesh have replicas."""
    for rank, other in parts.items():
        spread = other.spread
        assert isinstance(spread, Placed)
        own = (spread.mesh.shape, spread.placements, spread.order)
        wanted = (of_first.mesh.shape, of_first.placements, of_first.order)
        if own != wanted:
            message = (
                f"expected a mesh of {list(wanted[0])} as on rank {min(parts)}, found {list(own[0])} on rank {rank}"
            )
            raise Corrupt(f"{message}, or other placements", hint="check that all files come from one run")
    missing = [rank for rank in of_first.mesh.ranks if rank not in parts]
    if missing:
        message = f"expected a shard from each of {len(of_first.mesh.ranks)} ranks, found none from rank {missing[0]}"
        report(Incomplete(message, hint="check that no file is missing or from another run", ranks=missing))
    first = {}
    for rank in (rank for rank in of_first.mesh.ranks if rank in parts):
        spread = parts[rank].spread
        assert isinstance(spread, Placed)
        first[spread.mesh.coordinate] = rank
        if not spread.is_replica:
            yield from parts[rank].chunks
    for rank, other in parts.items():
        if rank not in of_first.mesh.ranks:
            assert isinstance(other.spread, Placed)
            same = first.get(other.spread.mesh.coordinate)
            if same is not None:
                compare(same, parts[same], rank, other)


def compare(one: int, held: RankTensor, other: int, other_held: RankTensor) -> None:
    """Raise `Unsupported` if checksums show that replicas differ. Those of storages with other tensors do not count."""
    for chunk, replica in zip(held.chunks, other_held.chunks, strict=True):
        is_comparable = None not in (chunk.crc32, replica.crc32) and chunk.run is None
        if is_comparable and chunk.crc32 != replica.crc32:
            message = f"the values differ between ranks {one} and {other}, and no file says how to join them"
            hint = "check whether the tensor is local to each rank, like experts or pipeline stages"
            raise Unsupported(message, hint=hint)


def check_same_shards(parts: Mapping[int, RankTensor], of_first: ShardedTensor, report: Report) -> None:
    """Raise `Corrupt` unless all ranks agree on all boxes, and each has one of them; report a missing rank."""
    for rank, other in parts.items():
        spread = other.spread
        assert isinstance(spread, ShardedTensor)
        if spread.boxes != of_first.boxes:
            message = (
                f"expected the list of {len(of_first.boxes)} shards that rank {min(parts)} has, found another list of "
                f"{len(spread.boxes)} on rank {rank}"
            )
            raise Corrupt(message, hint="check that all files come from one run")
        if not {chunk.box for chunk in other.chunks} <= set(of_first.boxes):
            raise Corrupt(f"rank {rank} has a shard that the list of all shards does not contain")
    beyond = [rank for rank in of_first.ranks if rank is not None and rank not in parts]
    if beyond:
        message = f"expected a shard from each of {len(of_first.ranks)} ranks, found none from rank {beyond[0]}"
        report(Incomplete(message, hint="check that no file is missing or from another run", ranks=beyond))


def unique_chunks(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Return the first chunk of each box, and one of the empty chunks."""
    by_box: dict[Box | None, Chunk] = {}
    for chunk in chunks:
        by_box.setdefault(chunk.box if chunk.box.numel else None, chunk)
    return tuple(by_box.values())
