"""Shard with `fully_shard` (FSDP2): one unit per block, and the root for the other parameters.

Parameters become DTensors and keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ckptkit.training.config import TrainConfig
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.parallel.initial import initialize_model
from ckptkit.training.parallel.precision import DTYPES, param_dtype


@dataclass(frozen=True, slots=True)
class Fsdp2:
    """FSDP2 on a mesh of [shards] or [replicas, shards]."""

    config: TrainConfig
    mesh: DeviceMesh
    seed: int | None

    def shard_model(self, blueprint: Blueprint, model: nn.Module) -> nn.Module:
        """Shard `model` on `meta`, then allocate only the shards, then initialize them."""
        device = self.mesh.device_type
        policy = MixedPrecisionPolicy(param_dtype(self.config, device), DTYPES[self.config.reduce_dtype])
        offload = CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy()
        # None: FSDP2 reshards blocks after forward but not the root, because backward starts with the root
        reshard = False if self.config.strategy == "shard_grad_op" else None
        blocks = blueprint.transformer_blocks(model)
        for unit in (*blocks, model):
            fully_shard(unit, mesh=self.mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
        set_prefetch(cast(Sequence[FSDPModule], blocks), self.config.prefetch)
        model.to_empty(device="cpu" if self.config.cpu_offload else device)
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(device))
        blueprint.tie_weights(model)
        initialize_model(blueprint, model, self.seed)
        return model

    def clip_gradients(self, model: nn.Module, limit: float) -> float:
        """Clip gradients to a norm, and return the norm before clipping; a collective."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @contextmanager
    def accumulating_gradients(self, model: nn.Module) -> Iterator[None]:
        """Return a context for all micro-batches but the last.

        Each micro-batch reduces gradients to shards, which saves memory. Replicas are reduced only in the last.
        """
        root = cast(FSDPModule, model)
        root.set_requires_all_reduce(False)
        yield
        root.set_requires_all_reduce(True)


def set_prefetch(blocks: Sequence[FSDPModule], ahead: int) -> None:
    """Make each block prefetch the next `ahead` blocks, in forward and in backward."""
    if not ahead:
        return
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[i + 1 : i + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(blocks[max(0, i - ahead) : i][::-1]))
