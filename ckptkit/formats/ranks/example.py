"""Derive from the files of one rank how to write files of ranks: names, mesh, and placements."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ckptkit.errors import Corrupt, IOFailure, Unsupported, skip_problem
from ckptkit.formats.archives.flatten import find_dict_items
from ckptkit.formats.pickles.inert_pickle import PersistentId, Record, walk_members
from ckptkit.formats.ranks.names import MODEL, WITH_WORLD, Naming, find_model_files
from ckptkit.formats.shards.dtensors import Placed, is_dtensor
from ckptkit.formats.shards.sharded_tensors import RankFile, ShardedTensor, read_rank_file
from ckptkit.formats.shards.write_dtensors import RankMesh
from ckptkit.io.file import names_in
from ckptkit.layout import Layout
from ckptkit.layout.placements import Placement, Shard

ALONE = RankMesh((1,))  # the mesh of a single rank


@dataclass(frozen=True, slots=True)
class Example:
    """A way to write files of ranks: their names, the mesh, and the placements of each model tensor.

    `spread` is empty if the example does not show which tensors are sharded; a replicated tensor has None there.
    `calls` are the DTensors of the example, which new ones imitate. `was_sharded`: its tensors are ShardedTensors.
    """

    naming: Naming = WITH_WORLD
    label: str = ""
    grid: RankMesh = ALONE
    spread: Mapping[str, tuple[Placement, ...] | None] = field(default_factory=dict)
    calls: Mapping[str, Record] = field(default_factory=dict)
    was_sharded: bool = False


def example_of_checkpoint(wanted: Layout) -> Example:
    """Return how a checkpoint in files of ranks was written; for any other, an example sharded by rows as in FSDP2."""
    rank_files = find_model_files(names_in(wanted.root), skip_problem) if wanted.format == "ranks" else None
    if rank_files is None:
        return Example()
    if not rank_files.naming.templates:
        raise Unsupported("ckptkit reads files with such names, but does not write them", hint="use `convert --to dcp`")
    model = first_readable_file(wanted, rank_files.files[MODEL])
    meshes = [tensor.spread.mesh for tensor in model.tensors.values() if isinstance(tensor.spread, Placed)]
    if any(len(mesh.ranks) != rank_files.world or mesh != meshes[0] for mesh in meshes):
        hint = "use `convert --to dcp`"
        raise Unsupported("the tensors are on several meshes, or on some of the ranks only", hint=hint)
    calls = {f"{MODEL}.{name}": value for name, value in find_dict_items(model.value) or () if is_dtensor(value)}
    storages = (member.value for member in walk_members(model.value) if isinstance(member, PersistentId))
    device = next((str(one[3]) for one in storages if isinstance(one, tuple) and len(one) > 3), "cuda")
    grid = RankMesh((rank_files.world,), device=device.partition(":")[0])
    if meshes:
        like = next(iter(calls.values())).args[3][-1]["_spec"].attributes()["mesh"]
        grid = RankMesh(meshes[0].shape, meshes[0].names, meshes[0].device, like)
    spread: dict[str, tuple[Placement, ...] | None] = {}
    for name, tensor in model.tensors.items():
        if isinstance(tensor.spread, Placed):
            spread[name] = tensor.spread.placements
        else:  # ShardedTensors are written as DTensors sharded by rows
            spread[name] = None if tensor.spread is None else (Shard(0),)
    return Example(
        naming=rank_files.naming,
        label=rank_files.label,
        grid=grid,
        spread=spread if any(spread.values()) else {},
        calls=calls,
        was_sharded=any(isinstance(tensor.spread, ShardedTensor) for tensor in model.tensors.values()),
    )


def first_readable_file(wanted: Layout, files: Mapping[int, str]) -> RankFile:
    """Return the readable file of the lowest rank: in a damaged checkpoint some may be unreadable."""
    *others, last = sorted(files)
    for rank in others:
        # try the next rank; the last one raises its error
        with suppress(Corrupt, IOFailure, Unsupported):
            return read_rank_file(wanted.root, files[rank], rank, (MODEL,))
    return read_rank_file(wanted.root, files[last], last, (MODEL,))
