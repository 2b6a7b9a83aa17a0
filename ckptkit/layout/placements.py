"""Compute which boxes of a tensor a rank of a mesh has, from the tensor's placements. Integer arithmetic only.

Source: torch/distributed/tensor/placement_types.py. Along an axis of the mesh a tensor is replicated or sharded as by
`torch.chunk`: equal shards, fewer elements in the last, then empty ones. Shards of one dimension are nested from the
mesh's first axis to its last, unless an order is given. A strided shard expresses that it was applied after a later
axis: it takes its shard of each of `stride` pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

from ckptkit.layout.box import Box, Shape

Run = tuple[int, int]  # (first index, count)


class Shard(NamedTuple):
    """A split of dimension `dim` along an axis of the mesh, within each of `stride` pieces."""

    dim: int
    stride: int = 1


Placement = Shard | None  # None: replicated


class PlacedBox(NamedTuple):
    """A box of the full tensor, and the index at which it begins in a rank's local tensor."""

    box: Box
    at: Shape


def local_shape_and_boxes(
    shape: Shape,
    mesh_shape: Shape,
    coordinate: Shape,
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
) -> tuple[Shape, list[PlacedBox]]:
    """Return the shape of the local tensor of the rank at `coordinate` of a mesh, and the boxes that it consists of.

    `placements` has one entry for each axis of the mesh. `order` is the order in which the axes apply. The result has
    one box, which may be empty, unless strided shards without a matching axis give several.
    """
    if order is None:
        order, placements = mesh_axis_order_and_shards(mesh_shape, placements)
    runs: list[list[Run]] = [[(0, extent)] for extent in shape]
    for axis in order:
        shard = placements[axis]
        if shard is not None:
            runs[shard.dim] = strided_shard_of(runs[shard.dim], mesh_shape[axis], coordinate[axis], shard.stride)
    local_shape = tuple(sum(count for _, count in along) for along in runs)
    ranges_by_dim = [along or [(extent, 0)] for along, extent in zip(runs, shape, strict=True)]
    starts = [[0, *accumulate(count for _, count in along)] for along in ranges_by_dim]
    boxes = []
    for index in product(*(range(len(along)) for along in ranges_by_dim)):
        chosen = [along[i] for along, i in zip(ranges_by_dim, index, strict=True)]
        box = Box(tuple(first for first, _ in chosen), tuple(count for _, count in chosen))
        boxes.append(PlacedBox(box, tuple(along[i] for along, i in zip(starts, index, strict=True))))
    return local_shape, boxes


def mesh_axis_order_and_shards(
    mesh_shape: Shape, placements: Sequence[Placement]
) -> tuple[Sequence[int], Sequence[Placement]]:
    """Return the order in which the axes of a mesh apply, and the placements without strides.

    Strides express that order. torch applies a strided shard literally, with the same result while all pieces are
    equal. Where they are not, ranks have a shard of a shard. Strides that express no order stay, with the mesh's own
    order.
    """
    order: list[int] = []
    for axis in reversed(range(len(mesh_shape))):
        shard = placements[axis]
        before = 0
        if shard is not None and shard.stride > 1:
            pieces = 1
            while pieces < shard.stride and before < len(order):
                other = placements[order[before]]
                pieces *= mesh_shape[order[before]] if other and other.dim == shard.dim else 1
                before += 1
            if pieces != shard.stride:
                return range(len(mesh_shape)), placements
        order.insert(before, axis)
    return order, [shard and Shard(shard.dim) for shard in placements]


def strided_shard_of(ranges: Sequence[Run], shard_count: int, index: int, stride: int) -> list[Run]:
    """Return shard `index` of `shard_count` in each of `stride` equal pieces of the index ranges."""
    total = sum(count for _, count in ranges)
    size = -(-total // stride)
    shard: list[Run] = []
    for start in range(0, total, size or 1):
        piece = narrow_ranges(ranges, start, start + size)
        # the last non-empty shard may have fewer elements, later ones none
        each = -(-sum(count for _, count in piece) // shard_count)
        for run in narrow_ranges(piece, index * each, (index + 1) * each):
            append_range(shard, run)
    return shard


def narrow_ranges(ranges: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the elements `start:stop`, or as many as there are, of concatenated index ranges."""
    kept: list[Run] = []
    at = 0
    for first, count in ranges:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            append_range(kept, (first + low, high - low))
        at += count
    return kept


def append_range(ranges: list[Run], added: Run) -> None:
    """Add an index range; extend the last one if they are adjacent."""
    if ranges and ranges[-1][0] + ranges[-1][1] == added[0]:
        ranges[-1] = (ranges[-1][0], ranges[-1][1] + added[1])
    else:
        ranges.append(added)
