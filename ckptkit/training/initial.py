"""Initialize each module from the seed and its name, so that the result does not depend on the sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.models.lora import LoraMatrix
from ckptkit.training.seeds import derive_seed


@torch.no_grad()
def initialize_model(blueprint: Blueprint, model: nn.Module, seed: int | None) -> None:
    """Initialize the weights and buffers of a materialized model, sharded or not.

    The values are the same at any world size: each rank creates the full parameters of one module at a time, and keeps
    its shards. Without a seed only buffers and adapters are initialized, and the other parameters must be loaded.
    """
    done: set[Tensor] = set()
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        new = {key: parameter for key, parameter in parameters.items() if parameter not in done}
        if has_values_outside_weights(module) or (new and seed is not None):
            whole = draw_initial_parameters(blueprint, name, module, seed or 0)
            for key, parameter in new.items():
                copy_into_shard(whole[key], parameter)
            done.update(new.values())


@torch.no_grad()
def copy_into_shard(full: Tensor, shard: Tensor) -> None:
    """Copy the full tensor `full`, present on the CPU of every rank, into this rank's shard `shard`, in its dtype."""
    if isinstance(shard, DTensor):
        # src_data_rank=None: every rank slices its own copy, without communication
        full = distribute_tensor(full.to(shard.dtype), shard.device_mesh, shard.placements, src_data_rank=None)
    shard.copy_(full)


def draw_initial_parameters(blueprint: Blueprint, name: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Initialize a module's direct buffers in place, and return its initial parameters as full CPU tensors."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    whole: dict[str, Tensor] = {
        key: nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="cpu"), requires_grad=False)
        for key, parameter in own.items()
    }
    try:
        for key, parameter in whole.items():
            setattr(module, key, parameter)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, name))
            blueprint.initialize_direct_tensors(name, module)
    finally:
        for key, parameter in own.items():
            setattr(module, key, parameter)
    return whole


def has_values_outside_weights(module: nn.Module) -> bool:
    """Return True if the module has values that loading weights does not set: buffers or an adapter's matrix."""
    return isinstance(module, LoraMatrix) or any(True for _ in module.buffers(recurse=False))
