"""Cut tensors that are whole into shards, on every rank its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def scatter(whole: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor, which each rank has on its CPU, into a rank's shard of it, of any dtype."""
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank cuts its own copy, nothing is sent
        tensor.copy_(
            distribute_tensor(whole.to(tensor.dtype), tensor.device_mesh, tensor.placements, src_data_rank=None)
        )
    else:
        tensor.copy_(whole)
