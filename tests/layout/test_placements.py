"""The boxes that a rank holds, against torch's own arithmetic on DTensors."""

from __future__ import annotations

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit.layout.placements import Placement, Shard, local_shape_and_boxes, mesh_axis_order_and_shards

MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple)


def in_torch(placement: Placement) -> Replicate | TorchShard | _StridedShard:
    if placement is None:
        return Replicate()
    dim, stride = placement
    return TorchShard(dim) if stride == 1 else _StridedShard(dim, split_factor=stride)


@st.composite
def layouts(draw: st.DrawFn, most_axes: int = 3) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    mesh, shape = draw(MESHES)[:most_axes], draw(SHAPES)
    shards = st.builds(Shard, st.integers(0, len(shape) - 1), st.integers(1, 4))
    return shape, mesh, [draw(st.none() | shards) for _ in mesh]


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh)))


@given(layouts())
def test_pieces_hold_what_torch_splits_off(layout: tuple[tuple[int, ...], tuple[int, ...], list[Placement]]) -> None:
    shape, mesh, placements = layout
    whole = torch.arange(math.prod(shape)).reshape(shape)
    order, plain = mesh_axis_order_and_shards(mesh, placements)
    for coordinate in coordinates(mesh):
        held = whole
        for axis in order:
            placement = in_torch(plain[axis])
            if not isinstance(placement, Replicate):
                held = placement._split_tensor(held, mesh[axis], with_padding=False)[0][coordinate[axis]]
        mine = torch.full(tuple(held.shape), -1)
        size, pieces = local_shape_and_boxes(shape, mesh, coordinate, placements)
        assert size == tuple(held.shape)
        for (start, extent), at in pieces:
            here = tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))
            mine[here] = whole[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
        assert torch.equal(mine, held)


@given(layouts(most_axes=2))
def test_places_shards_where_torch_does(layout: tuple[tuple[int, ...], tuple[int, ...], list[Placement]]) -> None:
    """Where all pieces are equal; of others torch says what no rank holds."""
    shape, mesh, placements = layout
    shape = tuple(n * math.prod(mesh) * math.prod(p.stride for p in placements if p) for n in shape)
    for coordinate in coordinates(mesh):
        held, pieces = local_shape_and_boxes(shape, mesh, coordinate, placements)
        in_theirs = list(map(in_torch, placements))
        theirs, start = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), in_theirs)
        assert held == tuple(theirs)
        if math.prod(held):
            assert pieces[0].box.start == tuple(start)
            assert pieces[0].at == (0,) * len(shape)


@given(SHAPES, MESHES, st.data())
def test_places_plain_shards_of_any_size_where_torch_does(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    placements = [data.draw(st.none() | st.builds(Shard, st.integers(0, len(shape) - 1), st.just(1))) for _ in mesh]
    for coordinate in coordinates(mesh):
        held, pieces = local_shape_and_boxes(shape, mesh, coordinate, placements)
        in_theirs = list(map(in_torch, placements))
        theirs, start = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), in_theirs)
        assert held == tuple(theirs)
        if math.prod(held):
            assert pieces[0].box.start == tuple(start)


def cut(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut a tensor as torch.chunk does, with empty pieces for the ranks that get none."""
    found = list(tensor.chunk(parts)) if tensor.numel() else []
    return found + [tensor[:0]] * (parts - len(found))


@given(st.integers(0, 23), st.integers(1, 4), st.integers(1, 4))
def test_a_strided_cut_before_another_makes_one_piece(rows: int, data: int, tensor: int) -> None:
    """Tensor parallelism cuts first, then FSDP each piece: what each rank holds is one box."""
    whole = torch.arange(rows)
    for i, j in product(range(data), range(tensor)):
        held, pieces = local_shape_and_boxes((rows,), (data, tensor), (i, j), [Shard(0, tensor), Shard(0)])
        expected = cut(cut(whole, tensor)[j], data)[i]
        assert len(pieces) == 1
        assert held == tuple(expected.shape)
        if held[0]:
            assert pieces[0].box.start == (int(expected[0]),)


@given(st.integers(0, 23), st.integers(1, 4), st.integers(1, 4))
def test_an_order_says_the_same_as_a_strided_cut(rows: int, data: int, tensor: int) -> None:
    for coordinate in product(range(data), range(tensor)):
        strided = local_shape_and_boxes((rows,), (data, tensor), coordinate, [Shard(0, tensor), Shard(0)])
        assert local_shape_and_boxes((rows,), (data, tensor), coordinate, [Shard(0), Shard(0)], order=(1, 0)) == strided
