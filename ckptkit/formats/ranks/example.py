"""Take from the files of one rank how to write files of ranks: names, mesh, and placements."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptkit.errors import Corrupt, IOFailure, Unsupported, ignore
from ckptkit.formats.archives.flatten import pairs_of
from ckptkit.formats.pickles.inert_pickle import PersistentId, Record, walk
from ckptkit.formats.ranks.names import MODEL, WITH_WORLD, Naming, find_files
from ckptkit.formats.shards.dtensors import Placed, is_dtensor
from ckptkit.formats.shards.sharded_tensors import RankFile, ShardedTensor, read_rank_file
from ckptkit.formats.shards.write_dtensors import RankMesh
from ckptkit.io.file import names_in
from ckptkit.layout import Layout
from ckptkit.layout.placements import Placement, Shard

_ROWS = Shard(0)


ALONE = RankMesh((1,))  # the mesh of a single rank


@dataclass(frozen=True, slots=True)
class Example:
    """A way to write: the names of files, the mesh, and by name of a model's tensor how it lies, None if on each rank.

    `calls` are the DTensors themselves, to be taken after. `is_told` if what is spread and what is not shows at all,
    `was_sharded` if ShardedTensors are.
    """

    naming: Naming = WITH_WORLD
    label: str = ""
    grid: RankMesh = ALONE
    spread: Mapping[str, tuple[Placement, ...] | None] = field(default_factory=dict)
    calls: Mapping[str, Record] = field(default_factory=dict)
    is_told: bool = False
    was_sharded: bool = False

    def for_world(self, world: int) -> RankMesh:
        """Return the mesh of `world` ranks: the first axis has what the others leave."""
        rest = self.grid.shape[1:]
        if world % prod(rest):
            message = (
                f"expected a multiple of {prod(rest)} ranks (axes of the mesh: "
                f"{' x '.join(map(str, rest))}), found {world}"
            )
            raise Unsupported(message, hint=f"pass a multiple of {prod(rest)}")
        return self.grid._replace(shape=(world // prod(rest), *rest))


def example_of(wanted: Layout) -> Example:
    """Return how the checkpoint was written, if it lies in files of ranks; else how to write one of rows by FSDP2."""
    found = find_files(names_in(wanted.root), ignore) if wanted.format == "ranks" else None
    if found is None:
        return Example()
    if not found.naming.templates:
        raise Unsupported("ckptkit reads files with such names, but does not write them", hint="use `convert --to dcp`")
    model = first_of(wanted, found.files[MODEL])
    meshes = [held.spread.mesh for held in model.tensors.values() if isinstance(held.spread, Placed)]
    if any(len(mesh.ranks) != found.world or mesh != meshes[0] for mesh in meshes):
        raise Unsupported(
            "the tensors are on several meshes, or on some of the ranks only", hint="use `convert --to dcp`"
        )
    calls = dtensors_in(model)
    grid = RankMesh((found.world,))
    if meshes:
        like = next(iter(calls.values())).args[3][-1]["_spec"].attributes()["mesh"]
        grid = RankMesh(meshes[0].shape, meshes[0].names, meshes[0].device, like)
    spread = {name: how_spread(held.spread) for name, held in model.tensors.items()}
    return Example(
        naming=found.naming,
        label=found.label,
        grid=grid if meshes else grid._replace(device=device_of(model.value)),
        spread=spread,
        calls=calls,
        is_told=any(spread.values()),
        was_sharded=any(isinstance(held.spread, ShardedTensor) for held in model.tensors.values()),
    )


def first_of(wanted: Layout, files: Mapping[int, str]) -> RankFile:
    """Return the file of the first rank of which one can be read: what is wanted may be all that is left of many."""
    *others, last = sorted(files)
    for rank in others:
        with suppress(Corrupt, IOFailure, Unsupported):
            return read_rank_file(wanted.root, files[rank], rank, (MODEL,))
    return read_rank_file(wanted.root, files[last], last, (MODEL,))


def how_spread(spread: Placed | ShardedTensor | None) -> tuple[Placement, ...] | None:
    """Return how a tensor lies on a mesh: ShardedTensors are written as DTensors in rows."""
    if isinstance(spread, Placed):
        return spread.placements
    return (_ROWS,) if isinstance(spread, ShardedTensor) else None


def dtensors_in(model: RankFile) -> dict[str, Record]:
    return {f"{MODEL}.{name}": value for name, value in pairs_of(model.value) or () if is_dtensor(value)}


def device_of(value: Any) -> str:
    """Return the kind of device that the tensors of a state dict were on."""
    for part in walk(value):
        if isinstance(part, PersistentId) and isinstance(part.value, tuple) and len(part.value) > 3:
            return str(part.value[3]).partition(":")[0]
    return "cuda"
