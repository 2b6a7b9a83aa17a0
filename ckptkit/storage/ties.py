"""Find names that share the memory of one tensor, and compare their values in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptkit.errors import Mismatch
from ckptkit.layout.box import whole
from ckptkit.storage.memory import part_of


def find_tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each name that is not the first of its tensor, with the first."""
    first: dict[object, str] = {}
    named = {name: first.setdefault(identify(tensor), name) for name, tensor in tensors.items()}
    return {name: one for name, one in named.items() if name != one}


def identify(tensor: Tensor) -> object:
    """Return what tied tensors have in common: where their elements lie, and in which order."""
    local = local_part(tensor)
    return local.data_ptr(), tensor.dtype, tensor.shape, local.stride()


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensor: Tensor) -> list[Tensor]:
    """Return the shards of a tensor that this rank has."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [local_part(tensor)]


def require_equal(tensors: Mapping[str, Tensor], tied: Mapping[str, str], path: Path) -> None:
    """Raise `Mismatch` unless what was loaded for a name is to the last bit what was for the one that it is tied to."""
    for name, one in tied.items():
        mine, other = (plain_bits(local_part(tensors[which])) for which in (name, one))
        if not torch.equal(mine, other):
            raise Mismatch(
                f"the model ties it to `{one}`, but the checkpoint's bytes differ",
                path=path,
                tensor=name,
                hint="if they were trained separately, build the model with a head of its own",
            )


def plain_bits(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor as bits, which compare as such."""
    return part_of(tensor, whole(tuple(tensor.shape)))
