"""Read DTensors and device meshes as torch pickles them: the local tensor of a rank, and its boxes of the full tensor.

Source: torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py; before torch 2.5 in torch/distributed/_tensor.
A DTensor is a call of `_rebuild_wrapper_subclass` with a state: the local tensor, and a spec of mesh, placements and
shard order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.tensor_calls import (
    REBUILD_WRAPPER,
    TensorRecord,
    as_shape,
    as_tensor_record,
    is_pickled_tensor_of_class,
)
from ckptkit.layout import Spec
from ckptkit.layout.box import Shape
from ckptkit.layout.placements import PlacedBox, Placement, Shard, local_shape_and_boxes

# Source of meshes: torch/distributed/device_mesh.py. Until torch 2.8 a mesh is an integer tensor of ranks, with a list
# of them beside it; since then a layout (shape and stride of each axis) over a map of ranks.
DEVICE_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_MOST_RANKS = 1 << 20

ReadIntegers = Callable[[Any], list[int]]  # returns the numbers in a pickled tensor of integers


class Mesh(NamedTuple):
    """A grid of ranks as one of them, at `coordinate`, sees it: `ranks` row by row; `names` are those of its axes."""

    shape: Shape
    ranks: tuple[int, ...]
    coordinate: Shape
    names: tuple[str, ...] | None
    device: str


def read_mesh(value: Any, rank: int, read_integers: ReadIntegers) -> Mesh:
    """Return a pickled mesh as `rank`, which must be in it, sees it. Raises `Unsupported` for an unknown kind."""
    if not (isinstance(value, Record) and value.of == DEVICE_MESH):
        raise Unsupported("a tensor is on an unknown kind of mesh")
    try:
        state = value.attributes()
        layout = state.get("_layout")
        device = str(state.get("_device_type", state.get("device_type")))
        names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
        if layout is None:
            shape = as_tensor_record(state["mesh"]).shape
            every = state.get("_flatten_mesh_list")
            ranks = tuple(every if every is not None else read_integers(state["mesh"]))
        else:
            shape, ranks = mesh_shape_and_ranks(layout, tuple(state["_flatten_rank_map"]), rank)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("the pickle describes a mesh in an unknown way") from error
    if not all(type(one) is int for one in ranks) or len(ranks) != prod(shape) or len(set(ranks)) != len(ranks):
        wanted = f"{prod(shape)} different ranks on a mesh of shape {list(shape)}"
        raise Corrupt(f"expected {wanted}, found {abbreviate_ranks(ranks)}")
    recorded = state.get("_rank")
    if rank not in ranks or (type(recorded) is int and recorded != rank):
        found_text = f"that of rank {recorded}" if recorded is not None else f"that of ranks {abbreviate_ranks(ranks)}"
        hint = "check whether the file was renamed"
        raise Corrupt(f"expected the mesh of rank {rank} (file name), found {found_text}", hint=hint)
    where = unravel(ranks.index(rank), shape)
    return Mesh(shape, ranks, where, tuple(map(str, names)) if names else None, device)


def mesh_shape_and_ranks(layout: Record, rank_map: tuple[int, ...], rank: int) -> tuple[Shape, tuple[int, ...]]:
    """Return shape and ranks of the mesh that a layout forms from a map of ranks; of several, the one with `rank`."""
    if len(rank_map) > _MOST_RANKS:
        raise ValueError("ranks")
    described = layout.attributes()
    if "axes" in described:
        nested = [(axis.attributes()["shape"], axis.attributes()["stride"]) for axis in described["axes"]]
    else:  # torch 2.9 stores all shapes in one tuple, all strides too
        both = (one if isinstance(one, tuple) else (one,) for one in (described["shape"], described["stride"]))
        nested = [(n, step) if isinstance(n, tuple) else ((n,), (step,)) for n, step in zip(*both, strict=True)]
    # sizes and strides: several of a flattened axis, none of an axis of size 1
    axes = [list(zip(as_shape(n), as_shape(step), strict=True)) for n, step in nested]
    shape = tuple(prod(size for size, _ in axis) for axis in axes)
    steps = [step for axis in axes for step in axis]
    if prod(shape) > len(rank_map) or any(step < 0 for _, step in steps):
        raise ValueError("layout")
    at = rank_map.index(rank)
    base = at - sum(at // step % size * step for size, step in steps if step)
    indices = [base]
    for size, step in steps:
        indices = [index + i * step for index in indices for i in range(size)]
    if not 0 <= min(indices) <= max(indices) < len(rank_map):
        raise ValueError("layout")
    return shape, tuple(rank_map[index] for index in indices)


def unravel(index: int, shape: Shape) -> Shape:
    """Return the coordinate of an element of a tensor of `shape` by its row-major index."""
    coordinate = []
    for extent in reversed(shape):
        coordinate.append(index % extent)
        index //= extent
    return tuple(reversed(coordinate))


def abbreviate_ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


_ROOMS = ("torch.distributed.tensor", "torch.distributed._tensor")
_MOST_PIECES = 4096  # boxes of one tensor on one rank


class Placed(NamedTuple):
    """A DTensor, as one rank has it. The field `held` is its local tensor."""

    spec: Spec
    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...] | None
    held: TensorRecord

    @property
    def is_replica_of_lower_rank(self) -> bool:
        """Return whether a rank at a lower coordinate of a replicated axis has the same data."""
        return any(shard is None and i for shard, i in zip(self.placements, self.mesh.coordinate, strict=True))

    @property
    def placed_boxes(self) -> list[PlacedBox]:
        """Return the boxes of this rank. Raises `Corrupt` if its local tensor has another shape."""
        local_shape, pieces = local_shape_and_boxes(
            self.spec.shape, self.mesh.shape, self.mesh.coordinate, self.placements, self.order
        )
        if self.held.shape != local_shape:
            where = ", ".join(map(str, self.mesh.coordinate))
            raise Corrupt(
                f"expected {list(local_shape)} of shape {list(self.spec.shape)} on the rank at ({where}) of a mesh of "
                f"{list(self.mesh.shape)}, found {list(self.held.shape)}"
            )
        if len(pieces) > _MOST_PIECES:
            raise Unsupported(f"expected one shard of the tensor on this rank, found {len(pieces)}")
        return pieces

    def as_seen_by_rank(self, rank: int) -> Placed:
        """Return the tensor as another rank of the mesh must have it."""
        mesh = self.mesh._replace(coordinate=unravel(self.mesh.ranks.index(rank), self.mesh.shape))
        shape, _ = local_shape_and_boxes(self.spec.shape, mesh.shape, mesh.coordinate, self.placements, self.order)
        return self._replace(mesh=mesh, held=replace(self.held, shape=shape))


def is_pickled_dtensor(value: Any) -> bool:
    return is_pickled_tensor_of_class(value, "DTensor", _ROOMS)


@dataclass(frozen=True, slots=True)
class Specs:
    """The meshes and placements in the file of one `rank`, each parsed once and shared by the tensors."""

    rank: int
    read_integers: ReadIntegers
    meshes: dict[int, Mesh] = field(default_factory=dict)
    placements: dict[int, tuple[Placement, ...]] = field(default_factory=dict)

    def read_dtensor(self, value: Record) -> Placed:
        """Return the tensor of a pickled DTensor. Raises `Unsupported` for a partial sum."""
        try:
            function, _, (_, _, size, *_), state = value.args
            if function != REBUILD_WRAPPER:
                raise Unsupported("the pickle builds the DTensor in an unknown way")
            attributes = state[-1] if isinstance(state, tuple) else state
            local = as_tensor_record(attributes["_local_tensor"])
            spec = attributes["_spec"].attributes()
            mesh = self.meshes.get(id(spec["mesh"]))
            if mesh is None:
                mesh = self.meshes[id(spec["mesh"])] = read_mesh(spec["mesh"], self.rank, self.read_integers)
            placements = self.placements.get(id(spec["placements"]))
            if placements is None:
                placements = tuple(read_placement(placement, mesh) for placement in spec["placements"])
                self.placements[id(spec["placements"])] = placements
            if len(placements) != len(mesh.shape):
                raise Corrupt(f"expected {len(mesh.shape)} placements (axes of the mesh), found {len(placements)}")
            shape = as_shape(size)
            meta = spec.get("tensor_meta")
            if meta is not None and as_shape(meta.args[0]) != shape:
                raise Corrupt(f"expected shape {list(as_shape(meta.args[0]))} (spec), found {list(shape)}")
            strided = any(shard is not None and shard.stride > 1 for shard in placements)
            order = None if strided else find_mesh_axis_order(spec.get("shard_order"), placements)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise Unsupported("the pickle describes the DTensor in an unknown way") from error
        if any(shard is not None and shard.dim >= len(shape) for shard in placements):
            raise Corrupt(f"a placement shards a dimension that shape {list(shape)} does not have")
        return Placed(Spec(local.dtype, shape), mesh, placements, order, local)


def read_placement(value: Record, mesh: Mesh) -> Placement:
    """Return one placement. Raises `Unsupported` for a partial or unknown one."""
    of = value.of
    if not (isinstance(of, Global) and of.module.startswith(_ROOMS)):
        raise Unsupported(f"a placement of class `{of}`")
    if of.name == "Replicate":
        return None
    if "Partial" in of.name:
        raise Unsupported(f"this is a partial sum (`{of.name}`): each rank has a summand, and no rank has the tensor")
    if of.name not in ("Shard", "_StridedShard"):
        raise Unsupported(f"a placement of class `{of}`")
    state = pickled_attributes_of(value)
    dim, stride = state["dim"], state.get("split_factor", 1)
    if type(dim) is not int or type(stride) is not int or dim < 0 or not 0 < stride <= prod(mesh.shape):
        raise ValueError("placement")
    return Shard(dim, stride)


def pickled_attributes_of(value: Record) -> Mapping[str, Any]:
    """Return the state of an object: also of one with slots, or of a call with positional arguments."""
    state = value.state
    if isinstance(state, tuple):
        return {name: value_ for slots in state if isinstance(slots, dict) for name, value_ in slots.items()}
    if state is None:
        return dict(zip(("dim", "split_factor"), value.args, strict=False))
    return value.attributes()


def find_mesh_axis_order(shard_order: Any, placements: tuple[Placement, ...]) -> tuple[int, ...] | None:
    """Return the order of the mesh axes that shard a tensor, None for the mesh's. It is recorded per dimension."""
    if not shard_order:
        return None
    order = [axis for entry in shard_order for axis in entry.args[1]]
    cutting = [axis for axis, shard in enumerate(placements) if shard is not None]
    if sorted(order) != cutting or any(
        placements[axis] != Shard(entry.args[0]) for entry in shard_order for axis in entry.args[1]
    ):
        raise ValueError("shard_order")
    return tuple(order)
