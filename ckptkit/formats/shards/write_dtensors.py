"""Write DTensors as torch pickles them: imitate one that was read, of any torch version, or write as torch 2.13 does.

Drops what a mesh remembers of the process that pickled it: process groups, and hashes of strings, which differ between
processes. Source: torch/distributed/device_mesh.py, torch/distributed/tensor/{_api,_dtensor_spec}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.tensor_calls import REBUILD_OF_TYPE, REBUILD_WRAPPER
from ckptkit.formats.shards.dtensors import DEVICE_MESH, unravel
from ckptkit.layout import Spec
from ckptkit.layout.box import Shape, row_major_strides
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.placements import Placement

_TENSOR = "torch.distributed.tensor"
_DTENSOR = Global(_TENSOR, "DTensor")
_SPEC = Global(f"{_TENSOR}._dtensor_spec", "DTensorSpec")
_META = Global(f"{_TENSOR}._dtensor_spec", "TensorMeta")
_ORDER = Global(f"{_TENSOR}._dtensor_spec", "ShardOrderEntry")
_PLACEMENTS = f"{_TENSOR}.placement_types"
_LAYOUT = Global("torch.distributed._mesh_layout", "_MeshLayout")
_AXIS = Global("torch.distributed._mesh_layout", "_FlatLayout")
_OF_PROCESS = ("_hash", "_dim_group_names", "_dim_group_infos", "_pg_registry")
_WHOLE_WORLD = ["0"]  # the name of the process group of all ranks


class RankMesh(NamedTuple):
    """A mesh of all ranks to write: shape, names of the axes, device; and a mesh to imitate, `like`."""

    shape: Shape
    names: tuple[str, ...] | None = ("fsdp",)
    device: str = "cuda"
    like: Record | None = None


def new_object_record(of: Global, state: dict[str, Any]) -> Record:
    """Return an object as a pickle creates one without calling `__init__`."""
    record = Record(of, (), is_new=True)
    record.state = state
    return record


def mesh_record(grid: RankMesh, rank: int, rank_tensor: Record) -> Record:
    """Return the mesh as `rank` sees it.

    `rank_tensor` is the tensor of all ranks, in the shape of `rank_tensor_content`.
    """
    world = tuple(range(prod(grid.shape)))
    where = unravel(rank, grid.shape)
    old = grid.like.attributes() if grid.like is not None else None
    if old is not None and "_layout" not in old:
        kept = {name: value for name, value in old.items() if name not in _OF_PROCESS}
        changes: dict[str, Any] = {"mesh": rank_tensor, "_flatten_mesh_list": world, "_coordinate_on_dim": list(where)}
        return new_object_record(DEVICE_MESH, {name: changes.get(name, value) for name, value in kept.items()})
    changes = {
        "_device_type": grid.device,
        "_layout": mesh_layout_record(grid, old["_layout"] if old else None),
        "_rank_map": rank_tensor,
        "_mesh_dim_names": grid.names,
        "_root_mesh": None,
        "_preserve_rank_order": False,  # torch 2.15 reads it when it compares meshes
        "_flatten_rank_map": world,
        "_thread_id": None,
        "_flatten_mapping": {},
        "_rank": rank,
        "_coordinate_on_dim": where,
    }
    if len(grid.shape) == 1:
        changes["_dim_group_names"] = list(_WHOLE_WORLD)
    return new_object_record(DEVICE_MESH, changes)


def rank_tensor_content(grid: RankMesh) -> tuple[Spec, bytes]:
    """Return spec and bytes of a mesh's tensor of ranks: in one dimension, or until torch 2.8 in the mesh's shape."""
    world = prod(grid.shape)
    is_old = grid.like is not None and "_layout" not in grid.like.attributes()
    shape = grid.shape if is_old else (world,)
    return Spec(DTYPES["int32"], shape), b"".join(rank.to_bytes(4, "little") for rank in range(world))


def mesh_layout_record(grid: RankMesh, like: Record | None) -> Record:
    """Return the shape and stride of each axis. As in torch, an axis of size 1 has empty ones."""
    strides = row_major_strides(grid.shape)
    if like is not None and "axes" not in like.attributes():
        is_bare = isinstance(like.attributes()["shape"], int)  # keep its form, or torch 2.10 considers it another mesh
        shape, stride = (grid.shape[0], strides[0]) if is_bare else (grid.shape, strides)
        return new_object_record(
            like.of if isinstance(like.of, Global) else _LAYOUT, {"shape": shape, "stride": stride}
        )
    axes = [((n,), (step,)) if n > 1 else ((), ()) for n, step in zip(grid.shape, strides, strict=True)]
    return new_object_record(
        _LAYOUT, {"axes": tuple(new_object_record(_AXIS, {"shape": n, "stride": step}) for n, step in axes)}
    )


def dtensor_record(
    spec: Spec, placements: Sequence[Placement], mesh: Record, local: Record, like: Record | None
) -> Record:
    """Return torch's call that rebuilds a DTensor from the local tensor of a rank, on the CPU.

    Imitates the DTensor `like`, whose spec it takes over but for the mesh.
    """
    of = _DTENSOR if like is None else like.args[1]
    dtype, strides = Global("torch", spec.dtype.name), row_major_strides(spec.shape)
    size = Record(Global("torch", "Size"), (spec.shape,))
    if like is not None:
        imitated = like.args[3][-1]["_spec"]
        old = imitated.attributes()
        meta = old.get("tensor_meta")
        kind = meta.of if isinstance(meta, Record) else _META
        changes = {"mesh": mesh, "tensor_meta": Record(kind, (size, strides, dtype), is_new=True), "_hash": None}
        spec_kind = imitated.of if isinstance(imitated.of, Global) else _SPEC
        described = new_object_record(spec_kind, {name: changes.get(name, value) for name, value in old.items()})
    else:
        axes_by_dim = {
            shard.dim: tuple(axis for axis, other in enumerate(placements) if other and other.dim == shard.dim)
            for shard in placements
            if shard
        }
        state = {
            "mesh": mesh,
            "placements": tuple(
                new_object_record(Global(_PLACEMENTS, "Shard" if p else "Replicate"), {"dim": p.dim} if p else {})
                for p in placements
            ),
            "tensor_meta": Record(_META, (size, strides, dtype), is_new=True),
            "shard_order": tuple(Record(_ORDER, entry, is_new=True) for entry in sorted(axes_by_dim.items())),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        described = new_object_record(_SPEC, state)
    device = Record(Global("torch", "device"), ("cpu",))
    layout = Record(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    call = (of, dtype, spec.shape, strides, 0, layout, device, False)
    return Record(REBUILD_OF_TYPE, (REBUILD_WRAPPER, of, call, (None, {"_local_tensor": local, "_spec": described})))
