"""Join the shards of each tensor from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.sharded_tensors import RankFile, RankTensor, ShardedTensor
from ckptkit.layout import OWN, Blob, Chunk, KeyPath, StoredTensor
from ckptkit.layout.box import Box

# buffers that differ between ranks: statistics of the data that a rank has seen
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def join_files(files: Sequence[RankFile], report: Report = refuse) -> FlatState:
    """Return the entries in the files of all ranks, with full tensors; their replicas are spares."""
    tensors = join_tensors(files, report)
    blobs, keys = join_blobs(files)
    every = {name: key for file in reversed(files) for name, key in file.flat.keys.items()}
    return FlatState(tensors, blobs, {name: every[name] for name in tensors} | keys, spares_of(files, tensors))


def join_tensors(files: Sequence[RankFile], report: Report = refuse) -> dict[str, StoredTensor]:
    """Return every tensor with the chunks of all ranks, in the order of the first rank that has it.

    Reports missing ranks, and tensors whose shards do not fit together, which are skipped.
    """
    names = dict.fromkeys(name for file in files for name in file.flat.tensors)
    by_rank = [(file.rank, file.name, file.tensors) for file in files]
    joined = {}
    for name in names:
        parts = {rank: tensors[name] for rank, _, tensors in by_rank if name in tensors}
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
    """Return one tensor with the chunks of all ranks.

    A plain tensor comes from the first rank if all ranks have the same. Raises `Unsupported` if checksums show that
    they differ, unless `may_differ`.
    """
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
    """Yield the chunks of a DTensor that are not replicas, in the order of the mesh.

    The mesh may be a slice of a larger one: then ranks outside it have replicas.
    """
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
    """Raise `Unsupported` if checksums show that two ranks have different values in place of replicas.

    The checksum of a storage with other tensors in it does not count.
    """
    for chunk, replica in zip(held.chunks, other_held.chunks, strict=True):
        is_comparable = None not in (chunk.crc32, replica.crc32) and chunk.run is None
        if is_comparable and chunk.crc32 != replica.crc32:
            raise Unsupported(
                f"the values differ between ranks {one} and {other}, and no file says how to join them",
                hint="check whether the tensor is local to each rank, like experts or pipeline stages",
            )


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


def join_blobs(files: Sequence[RankFile]) -> tuple[dict[str, Blob], dict[str, KeyPath]]:
    """Return the non-tensor entries, and their key paths: one for all ranks if equal, else one per rank."""
    blobs: dict[str, Blob] = {}
    keys: dict[str, KeyPath] = {}
    for name in dict.fromkeys(name for file in files for name in file.flat.blobs):
        by_file = [(file, file.flat.blobs[name]) for file in files if name in file.flat.blobs]
        key = by_file[0][0].flat.keys[name]
        if len({blob.content for _, blob in by_file}) == 1:
            blobs[name], keys[name] = by_file[0][1], key
            continue
        for file, blob in by_file:
            own = (OWN, f"rank_{file.rank}", *key)
            blobs[".".join(map(str, own))], keys[".".join(map(str, own))] = blob, own
    return blobs, keys
