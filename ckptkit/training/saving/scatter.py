"""Copy full tensors into the shards of each rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def scatter(whole: Tensor, tensor: Tensor) -> None:
    """Copy the full tensor `whole`, present on the CPU of every rank, into this rank's shard `tensor`.

    The copy casts to the dtype of the shard.
    """
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank slices its own copy, without communication
        tensor.copy_(
            distribute_tensor(whole.to(tensor.dtype), tensor.device_mesh, tensor.placements, src_data_rank=None)
        )
    else:
        tensor.copy_(whole)
