"""Shard with `fully_shard`, a unit per block and the root for the rest. Parameters become DTensors, same names."""

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
from ckptkit.training.parallel.initial import initialize
from ckptkit.training.parallel.precision import param_dtype, reduce_dtype


@dataclass(frozen=True, slots=True)
class Fsdp2:
    """FSDP2 on a mesh of [shards] or [replicas, shards]."""

    config: TrainConfig
    mesh: DeviceMesh
    seed: int | None

    def wrap(self, blueprint: Blueprint, model: nn.Module) -> nn.Module:
        """Shard on `meta`, then take memory for the shards alone, then fill them."""
        device = self.mesh.device_type
        policy = MixedPrecisionPolicy(param_dtype(self.config, device), reduce_dtype(self.config))
        offload = CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy()
        # None: blocks are freed after forward, and the root is not, for backward begins with it
        reshard = False if self.config.strategy == "shard_grad_op" else None
        blocks = blueprint.blocks(model)
        for unit in (*blocks, model):
            fully_shard(unit, mesh=self.mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
        prefetch(cast(Sequence[FSDPModule], blocks), self.config.prefetch)
        model.to_empty(device="cpu" if self.config.cpu_offload else device)
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(device))
        blueprint.tie(model)
        initialize(blueprint, model, self.seed)
        return model

    def clip(self, model: nn.Module, limit: float) -> float:
        """Clip to a norm by torch's function, which knows DTensors; return the one before, read by all ranks."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        """Reduce gradients to shards each time, which keeps them small, and across replicas once, at the end."""
        root = cast(FSDPModule, model)
        root.set_requires_all_reduce(False)
        yield
        root.set_requires_all_reduce(True)


def prefetch(blocks: Sequence[FSDPModule], ahead: int) -> None:
    """Let each block ask for the `ahead` next ones as it begins, forward and backward."""
    if not ahead:
        return
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[i + 1 : i + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(blocks[max(0, i - ahead) : i][::-1]))
