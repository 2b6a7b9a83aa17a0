"""Join the parts of each tensor from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.sharded_tensors import RankFile, RankTensor, ShardedTensor
from ckptkit.layout import OWN, Blob, Chunk, KeyPath, StoredTensor
from ckptkit.layout.box import Box

# buffers that each rank keeps for itself: statistics of what it has seen
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def join_files(files: Sequence[RankFile], report: Report = refuse) -> FlatState:
    """Return what is in the files of all ranks, each tensor whole; its further copies are spares."""
    tensors = join_tensors(files, report)
    blobs, keys = join_blobs(files)
    every = {name: key for file in reversed(files) for name, key in file.flat.keys.items()}
    return FlatState(tensors, blobs, {name: every[name] for name in tensors} | keys, spares_of(files, tensors))


def join_tensors(files: Sequence[RankFile], report: Report = refuse) -> dict[str, StoredTensor]:
    """Return every tensor with the chunks of all ranks, in the order in which the first rank that has it has it.

    Reports ranks that are missing, and tensors that do not fit together, which are left out.
    """
    names = dict.fromkeys(name for file in files for name in file.flat.tensors)
    by_rank = [(file.rank, file.name, file.tensors) for file in files]
    joined = {}
    for name in names:
        held = {rank: tensors[name] for rank, _, tensors in by_rank if name in tensors}
        try:
            joined[name] = join(held, naming(name, report), may_differ=name.endswith(STATISTICS))
        except CkptError as error:
            report(error.blame(tensor=name))
    return joined


def naming(name: str, report: Report) -> Report:
    return lambda problem: report(problem.blame(tensor=name))


def spares_of(files: Sequence[RankFile], joined: Mapping[str, StoredTensor]) -> dict[str, tuple[Chunk, ...]]:
    """Return the chunks that ranks have of the joined tensors beside those that were chosen, but for statistics."""
    found: dict[str, list[Chunk]] = {}
    chosen = {name: set(tensor.chunks) for name, tensor in joined.items() if not name.endswith(STATISTICS)}
    for file in files:
        for name, held in file.tensors.items():
            if name in chosen:
                found.setdefault(name, []).extend(chunk for chunk in held.chunks if chunk not in chosen[name])
    return {name: tuple(chunks) for name, chunks in found.items() if chunks}


def join(held: Mapping[int, RankTensor], report: Report, *, may_differ: bool = False) -> StoredTensor:
    """Return one tensor with the chunks of all ranks. A plain one is that of the first rank, if no other has another.

    Raises `Unsupported` if one has, by its checksum, unless they may differ.
    """
    first, tensor = next(iter(held.items()))
    for rank, other in held.items():
        if other.spec != tensor.spec or type(other.spread) is not type(tensor.spread):
            message = f"expected {describe(tensor)} as on rank {first}, found {describe(other)} on rank {rank}"
            raise Corrupt(message, hint="check that all files come from one run")
    if isinstance(tensor.spread, Placed):
        return StoredTensor(tensor.spec, unique(join_placed(held, tensor.spread, report)))
    if isinstance(tensor.spread, ShardedTensor):
        check_same_shards(held, tensor.spread, report)
        return StoredTensor(tensor.spec, unique(chunk for other in held.values() for chunk in other.chunks))
    for rank, other in held.items():
        if not may_differ:
            compare(first, tensor, rank, other)
    return StoredTensor(tensor.spec, tensor.chunks)


def describe(held: RankTensor) -> str:
    kinds = {Placed: "a DTensor", ShardedTensor: "a ShardedTensor"}
    return f"{kinds.get(type(held.spread), 'a plain tensor')} {held.spec}"


def join_placed(held: Mapping[int, RankTensor], of_first: Placed, report: Report) -> Iterable[Chunk]:
    """Yield the chunks of a DTensor that are no replicas, in the order of the mesh.

    A mesh may be a part of a larger one: then ranks off it hold the same again.
    """
    for rank, other in held.items():
        spread = other.spread
        assert isinstance(spread, Placed)
        here = (spread.mesh.shape, spread.placements, spread.order)
        there = (of_first.mesh.shape, of_first.placements, of_first.order)
        if here != there:
            message = (
                f"expected a mesh of {list(there[0])} as on rank {min(held)}, found {list(here[0])} on rank {rank}"
            )
            raise Corrupt(f"{message}, or other placements", hint="check that all files come from one run")
    missing = [rank for rank in of_first.mesh.ranks if rank not in held]
    if missing:
        message = f"expected a part of it from {len(of_first.mesh.ranks)} ranks; rank {missing[0]} does not have one"
        report(Incomplete(message, hint="check that no file is missing or from another run", ranks=missing))
    first = {}
    for rank in (rank for rank in of_first.mesh.ranks if rank in held):
        spread = held[rank].spread
        assert isinstance(spread, Placed)
        first[spread.mesh.coordinate] = rank
        if not spread.is_replica:
            yield from held[rank].chunks
    for rank, other in held.items():
        if rank not in of_first.mesh.ranks:
            assert isinstance(other.spread, Placed)
            same = first.get(other.spread.mesh.coordinate)
            if same is not None:
                compare(same, held[same], rank, other)


def compare(one: int, held: RankTensor, other: int, other_held: RankTensor) -> None:
    """Raise `Unsupported` if by their checksums two ranks have other numbers where they should have the same.

    The checksum of a storage that a tensor is a part of does not tell.
    """
    for chunk, again in zip(held.chunks, other_held.chunks, strict=True):
        is_told = None not in (chunk.crc32, again.crc32) and chunk.run is None
        if is_told and chunk.crc32 != again.crc32:
            raise Unsupported(
                f"the values differ between ranks {one} and {other}, and no file says how to join them",
                hint="check whether the tensor is local to each rank, like experts or pipeline stages",
            )


def check_same_shards(held: Mapping[int, RankTensor], of_first: ShardedTensor, report: Report) -> None:
    """Raise `Corrupt` unless all agree on all boxes, and each holds one of them; report a rank that is missing."""
    for rank, other in held.items():
        spread = other.spread
        assert isinstance(spread, ShardedTensor)
        if spread.boxes != of_first.boxes:
            message = (
                f"expected the {len(of_first.boxes)} shards of rank {min(held)}, found {len(spread.boxes)} "
                f"or others on rank {rank}"
            )
            raise Corrupt(message, hint="check that all files come from one run")
        if not {chunk.box for chunk in other.chunks} <= set(of_first.boxes):
            raise Corrupt(f"rank {rank} has a shard that the list of all shards does not contain")
    beyond = [rank for rank in of_first.ranks if rank is not None and rank not in held]
    if beyond:
        message = f"expected a part of it from {len(of_first.ranks)} ranks; rank {beyond[0]} does not have one"
        report(Incomplete(message, hint="check that no file is missing or from another run", ranks=beyond))


def unique(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Return the first chunk of each box; of those that are empty one."""
    found: dict[Box | None, Chunk] = {}
    for chunk in chunks:
        found.setdefault(chunk.box if chunk.box.numel else None, chunk)
    return tuple(found.values())


def join_blobs(files: Sequence[RankFile]) -> tuple[dict[str, Blob], dict[str, KeyPath]]:
    """Return the entries that are no tensors, and their key paths: one for all ranks, or else each rank's own."""
    blobs: dict[str, Blob] = {}
    keys: dict[str, KeyPath] = {}
    for name in dict.fromkeys(name for file in files for name in file.flat.blobs):
        there = [(file, file.flat.blobs[name]) for file in files if name in file.flat.blobs]
        key = there[0][0].flat.keys[name]
        if len({blob.content for _, blob in there}) == 1:
            blobs[name], keys[name] = there[0][1], key
            continue
        for file, blob in there:
            own = (OWN, f"rank_{file.rank}", *key)
            blobs[".".join(map(str, own))], keys[".".join(map(str, own))] = blob, own
    return blobs, keys
