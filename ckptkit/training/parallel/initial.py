"""Initialize each module from the seed and its name, so that the result does not depend on the sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.models.lora import LoraMatrix
from ckptkit.training.saving.scatter import scatter
from ckptkit.training.seeds import derive


@torch.no_grad()
def initialize(blueprint: Blueprint, model: nn.Module, seed: int | None) -> None:
    """Initialize the weights and buffers of a materialized model, sharded or not.

    The values are the same at any world size: each rank creates the full parameters of one module at a time, and keeps
    its shards. Without a seed only buffers and adapters are initialized, and the other parameters must be loaded.
    """
    done: set[Tensor] = set()
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        new = {key: parameter for key, parameter in parameters.items() if parameter not in done}
        if has_own_values(module) or (new and seed is not None):
            whole = initialize_module(blueprint, name, module, seed or 0)
            for key, parameter in new.items():
                scatter(whole[key], parameter)
            done.update(new.values())


def initialize_module(blueprint: Blueprint, name: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Initialize a module's direct buffers in place, and return its initial parameters as full CPU tensors."""
    with whole_parameters(module) as whole, torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, name))
        blueprint.initialize(name, module)
    return whole


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace the module's direct parameters by full fp32 parameters on the CPU inside the block."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    whole = {
        key: nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="cpu"), requires_grad=False)
        for key, parameter in own.items()
    }
    set_parameters(module, whole)
    try:
        yield dict(whole)
    finally:
        set_parameters(module, own)


def set_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        setattr(module, name, parameter)


def has_own_values(module: nn.Module) -> bool:
    """Return True if the module has values that loading weights does not set: buffers or an adapter's matrix."""
    return isinstance(module, LoraMatrix) or any(True for _ in module.buffers(recurse=False))
