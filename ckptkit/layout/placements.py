"""Compute which boxes of a tensor a rank of a mesh holds, by how the tensor is placed on it. Integers only.

Source: torch/distributed/tensor/placement_types.py. Along an axis of the mesh a tensor is replicated or cut in pieces,
as by `torch.chunk`: equal ones, fewer elements in the last, then none. Cuts of one dimension follow each other from the
mesh's first axis to its last, unless an order is given. A strided cut is a way to say that it came after that of a
later axis: it takes its part of each of `stride` pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from ckptkit.layout.box import Box, Shape

Run = tuple[int, int]  # the first index and how many


class Shard(NamedTuple):
    """A cut of dimension `dim` along an axis of the mesh, in each of `stride` pieces."""

    dim: int
    stride: int = 1


Placement = Shard | None  # None: replicated


class PlacedBox(NamedTuple):
    """A box of the whole tensor, and where it begins in the tensor that a rank holds."""

    box: Box
    at: Shape


def place(
    shape: Shape,
    mesh: Shape,
    coordinate: Shape,
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
) -> tuple[Shape, list[PlacedBox]]:
    """Return the shape of the tensor that the rank at `coordinate` of a mesh holds, and the pieces that it is made of.

    `placements` has one for each axis of the mesh, `order` the axes as they are to be gone through. There is one piece,
    empty if the rank holds nothing, but where strided cuts stand alone.
    """
    if order is None:
        order, placements = unfold(mesh, placements)
    runs: list[list[Run]] = [[(0, extent)] for extent in shape]
    for axis in order:
        shard = placements[axis]
        if shard is not None:
            runs[shard.dim] = cut_strided(runs[shard.dim], mesh[axis], coordinate[axis], shard.stride)
    held = tuple(sum(count for _, count in along) for along in runs)
    ends = [along or [(extent, 0)] for along, extent in zip(runs, shape, strict=True)]
    return held, list(combine(ends))


def unfold(mesh: Shape, placements: Sequence[Placement]) -> tuple[Sequence[int], Sequence[Placement]]:
    """Return the order in which the axes of a mesh cut, and the placements without strides, which said that order.

    torch takes a strided cut as it stands, which is the same while all pieces are equal. Where they are not, what ranks
    hold is the part of a part. Strides that say no order are left, with the mesh's own order.
    """
    order: list[int] = []
    for axis in reversed(range(len(mesh))):
        shard = placements[axis]
        before = 0
        if shard is not None and shard.stride > 1:
            pieces = 1
            while pieces < shard.stride and before < len(order):
                other = placements[order[before]]
                pieces *= mesh[order[before]] if other and other.dim == shard.dim else 1
                before += 1
            if pieces != shard.stride:
                return range(len(mesh)), placements
        order.insert(before, axis)
    return order, [shard and Shard(shard.dim) for shard in placements]


def combine(runs: Sequence[Sequence[Run]]) -> Iterator[PlacedBox]:
    """Yield the pieces that runs along each dimension make."""
    starts = [[0, *accumulate(count for _, count in along)] for along in runs]
    for index in product(*(range(len(along)) for along in runs)):
        chosen = [along[i] for along, i in zip(runs, index, strict=True)]
        box = Box(tuple(first for first, _ in chosen), tuple(count for _, count in chosen))
        yield PlacedBox(box, tuple(along[i] for along, i in zip(starts, index, strict=True)))


def cut_strided(runs: Sequence[Run], parts: int, index: int, stride: int) -> list[Run]:
    """Return the part with this index of each of `stride` equal pieces of the runs."""
    total = sum(count for _, count in runs)
    size = -(-total // stride)
    found: list[Run] = []
    for start in range(0, total, size or 1):
        for run in cut(narrow(runs, start, start + size), parts, index):
            append(found, run)
    return found


def cut(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Return one of equal parts of the runs; the last with elements may have fewer, and those after it have none."""
    size = -(-sum(count for _, count in runs) // parts)
    return narrow(runs, index * size, (index + 1) * size)


def narrow(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the elements `start:stop`, or as many as there are, of runs that are counted as one."""
    found: list[Run] = []
    at = 0
    for first, count in runs:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            append(found, (first + low, high - low))
        at += count
    return found


def append(runs: list[Run], run: Run) -> None:
    """Add a run, as part of the last one if it goes on with that."""
    if runs and runs[-1][0] + runs[-1][1] == run[0]:
        runs[-1] = (runs[-1][0], runs[-1][1] + run[1])
    else:
        runs.append(run)
