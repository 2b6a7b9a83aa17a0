"""Read device meshes as torch pickles them: which ranks stand where.

Source: torch/distributed/device_mesh.py. Until torch 2.8 a mesh is an integer tensor of ranks, with the list of them
beside it; since then a layout, the shape and stride of each axis, over a map of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.tensor_calls import as_shape, as_tensor
from ckptkit.layout.box import Shape

DEVICE_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_MOST_RANKS = 1 << 20

ReadIntegers = Callable[[Any], list[int]]  # the numbers in a pickled tensor of integers


class Mesh(NamedTuple):
    """A grid of ranks, as one of them sees it: those at `ranks`, row by row, of which it is at `coordinate`.

    `names` are those of the axes.
    """

    shape: Shape
    ranks: tuple[int, ...]
    coordinate: Shape
    names: tuple[str, ...] | None
    device: str


def read_mesh(value: Any, rank: int, read_integers: ReadIntegers) -> Mesh:
    """Return the mesh that a pickled value would have been, as `rank` sees it.

    Raises `Corrupt` if that rank is not in it, `Unsupported` for what is no mesh that is known here.
    """
    if not (isinstance(value, Record) and value.of == DEVICE_MESH):
        raise Unsupported("a tensor is on an unknown kind of mesh")
    try:
        state = value.attributes()
        layout = state.get("_layout")
        device = str(state.get("_device_type", state.get("device_type")))
        names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
        if layout is None:
            shape = as_tensor(state["mesh"]).shape
            every = state.get("_flatten_mesh_list")
            ranks = tuple(every if every is not None else read_integers(state["mesh"]))
        else:
            shape, ranks = spread(layout, tuple(state["_flatten_rank_map"]), rank)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("the pickle describes a mesh in an unknown way") from error
    if not all(type(one) is int for one in ranks) or len(ranks) != prod(shape) or len(set(ranks)) != len(ranks):
        raise Corrupt(
            f"expected {prod(shape)} different ranks on a mesh of shape {list(shape)}, found {abridge(ranks)}"
        )
    recorded = state.get("_rank")
    if rank not in ranks or (type(recorded) is int and recorded != rank):
        seen = f"that of rank {recorded}" if recorded is not None else f"that of ranks {abridge(ranks)}"
        raise Corrupt(
            f"expected the mesh of rank {rank} (file name), found {seen}", hint="check whether the file was renamed"
        )
    where = unravel(ranks.index(rank), shape)
    return Mesh(shape, ranks, where, tuple(map(str, names)) if names else None, device)


def spread(layout: Record, every: tuple[int, ...], rank: int) -> tuple[Shape, tuple[int, ...]]:
    """Return shape and ranks of the mesh that a layout makes of a map of ranks, the one with `rank` in it."""
    if len(every) > _MOST_RANKS:
        raise ValueError("ranks")
    axes = axes_of(layout.attributes())
    shape = tuple(prod(size for size, _ in axis) for axis in axes)
    steps = [step for axis in axes for step in axis]
    if prod(shape) > len(every) or any(step < 0 for _, step in steps):
        raise ValueError("layout")
    at = every.index(rank)
    base = at - sum(at // step % size * step for size, step in steps if step)
    places = [base]
    for size, step in steps:
        places = [place + i * step for place in places for i in range(size)]
    if not 0 <= min(places) <= max(places) < len(every):
        raise ValueError("layout")
    return shape, tuple(every[place] for place in places)


def axes_of(state: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Return sizes and strides of each axis of a layout; torch 2.9 has all shapes and all strides in one tuple each."""
    if "axes" in state:
        return [axis_of(axis) for axis in state["axes"]]
    shape, stride = (one if isinstance(one, tuple) else (one,) for one in (state["shape"], state["stride"]))
    nested = [(n, step) if isinstance(n, tuple) else ((n,), (step,)) for n, step in zip(shape, stride, strict=True)]
    return [list(zip(as_shape(n), as_shape(step), strict=True)) for n, step in nested]


def axis_of(axis: Any) -> list[tuple[int, int]]:
    """Return sizes and strides of an axis: several of one that others were flattened into, none of one of size 1."""
    state = axis.attributes()
    return list(zip(as_shape(state["shape"]), as_shape(state["stride"]), strict=True))


def unravel(index: int, shape: Shape) -> Shape:
    """Return the coordinate of an element of a tensor of `shape` by its number, row by row."""
    found = []
    for extent in reversed(shape):
        found.append(index % extent)
        index //= extent
    return tuple(reversed(found))


def abridge(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
