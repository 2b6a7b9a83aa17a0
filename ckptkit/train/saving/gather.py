"""Gathering: sharded tensors made whole on the CPU of rank 0, one at a time, and cut into shards again there.

torch's own way to a full state dict is not taken: on the CPU that of FSDP1 gives one moment of Adam for the other
(2.13). A sharded state is right under every wrapper, and whole tensors are made of it here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptkit.train.saving.peers import Peers
from ckptkit.train.saving.trees import Tree, map_tensors


class Gatherer:
    """Makes tensors whole on rank 0, as copies. Two names of one tensor, as tied weights are, share one copy."""

    def __init__(self, peers: Peers) -> None:
        self._is_first = peers.rank == 0
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def gather(self, state: Tree) -> Tree:
        """The state with whole tensors on rank 0, and none on the others: these hold one at a time."""
        gathered: Tree = map_tensors(self._keep, state)
        return gathered

    @torch.no_grad()
    def _keep(self, tensor: Tensor) -> Tensor | None:
        whole = make_whole(tensor)
        if not self._is_first:
            return None
        identity = identify(tensor)
        if identity not in self._copies:
            self._copies[identity] = whole.to("cpu", copy=True)
        return self._copies[identity]


def identify(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of the same tensor have in common: the memory of this rank's shard, and the shape of the whole."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(local, ShardedTensor) or not local.numel():
        return (id(tensor),)
    return (local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape)


def make_whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on every rank that has a part of it: a collective of those."""
    if isinstance(tensor, DTensor):
        there = tensor.device_mesh.device_type
        on_mesh: Any = tensor if tensor.device.type == there else tensor.to(there)  # it may be offloaded to the CPU
        whole: Tensor = on_mesh.full_tensor()
        return whole
    if isinstance(tensor, ShardedTensor):
        return make_whole_of_sharded(tensor)
    return tensor.detach()


def make_whole_of_sharded(tensor: ShardedTensor) -> Tensor:
    """The whole of a tensor of FSDP1 without a device mesh. Its own `gather` goes wrong in float64 and in HSDP."""
    group = tensor._process_group
    local = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in tensor.local_shards()}
    whole = torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor._get_preferred_device())
    for shard in tensor.metadata().shards_metadata:
        box = box_of(whole, shard)
        mine = local.get(tuple(shard.shard_offsets))
        sent = torch.empty_like(box) if mine is None else mine.detach().contiguous()
        assert shard.placement is not None
        dist.broadcast(sent, src=shard.placement.rank(), group=group)
        box.copy_(sent)
    return whole


def box_of(whole: Tensor, shard: ShardMetadata) -> Tensor:
    """The part of a whole tensor that a shard of it is."""
    spans = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return whole[tuple(slice(start, start + size) for start, size in spans)]


@torch.no_grad()
def scatter(whole: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor, which each rank has on its CPU, into a rank's shard of it."""
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank cuts its own copy, nothing is sent
        tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            shard.tensor.copy_(box_of(whole, shard.metadata))
    else:
        tensor.copy_(whole)


def copy_sharded(tensor: ShardedTensor) -> Tensor:
    """A copy on the CPU of a tensor of FSDP1 without a device mesh."""
    on_cpu = tensor.cpu()
    return on_cpu if on_cpu is not tensor else tensor.clone()
