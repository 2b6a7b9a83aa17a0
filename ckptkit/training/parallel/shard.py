"""Build a sharded model from a blueprint. No rank ever has the full model in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from ckptkit.errors import Usage
from ckptkit.training.config import TrainConfig
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.parallel.fsdp1 import Fsdp1
from ckptkit.training.parallel.fsdp2 import Fsdp2


def set_recomputation(blocks: Sequence[nn.Module], every: int) -> None:
    """Checkpoint the activations of every `every`-th block: backward recomputes them from its inputs; 0: none.

    Wraps `forward`, so no tensor changes its name. FSDP1 and FSDP2 gather parameters before a block's `forward` and
    free them after it, also in backward, so the recomputation inside it finds the parameters gathered.
    """
    for block in blocks[every - 1 :: every] if every else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block; blocks of the same class share the compilation. Call it after `set_recomputation`."""
    for block in blocks:
        block.forward = torch.compile(block.forward)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A sharded model, and facts about the model before sharding.

    `first_names` maps each name in the state dict to the first name of the same (tied) tensor. `matrices` are the names
    of parameters with two dimensions or more. `multiplied` counts the parameters that every token is multiplied with,
    which excludes embeddings, and `frozen` counts the frozen parameters among them.
    """

    model: nn.Module
    sharding: Fsdp1 | Fsdp2
    first_names: Mapping[str, str]
    matrices: frozenset[str]
    multiplied: int
    frozen: int


def build_sharded_model(config: TrainConfig, blueprint: Blueprint, mesh: DeviceMesh, seed: int | None) -> ShardedModel:
    """Build the model of `blueprint`, sharded on the mesh of all ranks, with weights initialized from `seed`.

    With `seed` None the weights are uninitialized and must be loaded. Raises `Usage` for a glob in `config.freeze` that
    matches no parameter, and for a strategy that does not fit the ranks.
    """
    with torch.device("meta"):
        model = blueprint.build()
    parameters = dict(model.named_parameters())
    matrices = frozenset(name for name, parameter in parameters.items() if parameter.ndim > 1)
    for glob in config.freeze:
        matching = [name for name in parameters if fnmatchcase(name, glob)]
        if not matching:
            message = f"--freeze: expected a glob that matches a parameter, found `{glob}`"
            raise Usage(message, hint=f"pass names such as `{next(iter(parameters))}`")
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise Usage("--freeze: expected a parameter that is not frozen, found none", hint="drop a --freeze")
    blocks = blueprint.transformer_blocks(model)
    set_recomputation(blocks, config.recompute_every)
    if config.compile:
        compile_blocks(blocks)
    first: dict[torch.Tensor, str] = {}
    first_names = {name: first.setdefault(tensor, name) for name, tensor in model.state_dict(keep_vars=True).items()}
    strategy_mesh = mesh_for_strategy(config, mesh)
    sharding = (Fsdp1 if config.fsdp == "1" else Fsdp2)(config, strategy_mesh, seed)
    multiplied, frozen = count_matmul_elements(model)
    return ShardedModel(sharding.shard_model(blueprint, model), sharding, first_names, matrices, multiplied, frozen)


def mesh_for_strategy(config: TrainConfig, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that the strategy needs: [shards] or [replicas, shards]."""
    world_size = mesh.size()
    if config.cpu_offload and mesh.device_type == "cpu":
        raise Usage("--cpu-offload: expected a GPU, found the device cpu", hint="drop --cpu-offload")
    if config.strategy == "hybrid_shard":
        if config.replicas == 1 or world_size % config.replicas:
            raise Usage(
                f"--replicas: expected a divisor of {world_size} ranks, 2 or more, found {config.replicas}",
                hint="pass the number of machines",
            )
        shape = (config.replicas, world_size // config.replicas)
    elif config.strategy == "ddp" and config.fsdp == "2":
        shape = (world_size, 1)  # FSDP2 replicates if each replica has one shard
    else:
        return mesh
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))


def count_matmul_elements(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements of all parameters outside embeddings, and of the frozen ones among them."""
    owners = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    parameters = {parameter for module in owners for parameter in module.parameters(recurse=False)}
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return sum(parameter.numel() for parameter in parameters), frozen
