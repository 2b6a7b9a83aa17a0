"""Shard with `FullyShardedDataParallel` (FSDP1).

FSDP1 flattens each unit into one buffer and adds the prefix `_fsdp_wrapped_module.` to parameter names. On the CPU
torch 2.13 trains it if `device_id` is passed. Its sharded state dict is correct there, its full state dict is not.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from ckptkit.errors import Usage
from ckptkit.training.config import TrainConfig
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.models.lora import LoraMatrix
from ckptkit.training.parallel.initial import copy_into_shard, has_values_not_loaded, initialize_module
from ckptkit.training.parallel.precision import DTYPES, param_dtype

STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "ddp": ShardingStrategy.NO_SHARD,
}


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """FSDP1 on a mesh of [shards] or [replicas, shards]."""

    config: TrainConfig
    mesh: DeviceMesh
    seed: int | None

    def shard_model(self, blueprint: Blueprint, model: nn.Module) -> nn.Module:
        """Shard `model`. Units are materialized one at a time, and each is sharded before the next."""
        if self.mesh.shape[-1] == 1 or self.config.strategy == "ddp":
            require_trained_units(blueprint, model)
        device = (
            torch.device("cpu") if self.mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
        )
        names = {module: name for name, module in model.named_modules()}

        def materialize(module: nn.Module) -> None:
            if not any(
                tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            ):
                return  # its weight is tied to a module that is already materialized
            module.to_empty(device=device, recurse=False)
            if self.seed is not None or has_values_not_loaded(module):
                whole = initialize_module(blueprint, names[module], module, self.seed or 0)
                for name, parameter in module.named_parameters(recurse=False):
                    copy_into_shard(whole[name], parameter)
            blueprint.tie_weights(model)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated, but `--strategy ddp` needs it
            warnings.filterwarnings("ignore", ".* has both parameters with requires_grad")  # expected with `--freeze`
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # the only strategy on one rank
            return FullyShardedDataParallel(
                model,
                device_mesh=self.mesh,
                device_id=device,
                sharding_strategy=STRATEGIES[self.config.strategy],
                auto_wrap_policy=self._wrap_policy(blueprint, model),
                mixed_precision=MixedPrecision(
                    param_dtype(self.config, self.mesh.device_type), DTYPES[self.config.reduce_dtype]
                ),
                cpu_offload=CPUOffload(offload_params=self.config.cpu_offload),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE
                if self.config.prefetch
                else BackwardPrefetch.BACKWARD_POST,
                forward_prefetch=bool(self.config.prefetch),
                param_init_fn=materialize,
                use_orig_params=True,
            )

    def _wrap_policy(self, blueprint: Blueprint, model: nn.Module) -> Any:
        if self.config.wrap == "block":
            return ModuleWrapPolicy({LoraMatrix, *map(type, blueprint.transformer_blocks(model))})
        if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
            message = "--wrap: expected block for a model with tied weights, found size: a unit could separate them"
            raise Usage(message, hint="pass --wrap block, or an untied model")
        return partial(size_based_auto_wrap_policy, min_num_params=self.config.wrap_parameters)

    def clip_gradients(self, model: nn.Module, limit: float) -> float:
        """Clip gradients to a norm, and return the norm before clipping.

        Uses FSDP1's method: `torch.nn.utils.clip_grad_norm_` would see only the shards of this rank.
        """
        return float(cast(FullyShardedDataParallel, model).clip_grad_norm_(limit))

    def accumulating_gradients(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for all micro-batches but the last.

        With "ddp" gradients stay local until the last. Otherwise each micro-batch reduces them to shards, because
        unsharded gradients may not fit into memory.
        """
        is_replicated = self.config.strategy == "ddp"
        return cast(FullyShardedDataParallel, model).no_sync() if is_replicated else nullcontext()


def require_trained_units(blueprint: Blueprint, model: nn.Module) -> None:
    """Raise `Usage` if all parameters of an FSDP unit are frozen. For unsharded models only.

    torch 2.13 does not reshard such a unit: its parameters become plain tensors, and the second step fails.
    """
    adapters = {
        parameter for module in model.modules() if isinstance(module, LoraMatrix) for parameter in module.parameters()
    }
    # adapters are FSDP units of their own
    blocks = [set(block.parameters()) - adapters for block in blueprint.transformer_blocks(model)]
    units = [*blocks, set(model.parameters()).difference(adapters, *blocks)]
    if not all(any(parameter.requires_grad for parameter in unit) for unit in units):
        message = "--fsdp 1: expected shards of each frozen unit, found units that each rank has in full"
        raise Usage(message, hint="pass --fsdp 2, or shard over more ranks")
