"""Build a sharded model from a blueprint. No rank ever has the full model in memory.

FSDP1 (`FullyShardedDataParallel`) flattens each unit into one buffer and adds the prefix `_fsdp_wrapped_module.` to
parameter names. On the CPU torch 2.13 trains it if `device_id` is passed. Its sharded state dict is correct there, its
full state dict is not.

FSDP2 (`fully_shard`) has one unit per block, and the root for the other parameters. Parameters become DTensors and keep
their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ckptkit.errors import Usage
from ckptkit.training.config import TrainConfig
from ckptkit.training.initial import (
    copy_into_shard,
    draw_initial_parameters,
    has_values_outside_weights,
    initialize_model,
)
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.models.lora import LoraMatrix

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "ddp": ShardingStrategy.NO_SHARD,
}


def param_dtype(config: TrainConfig, device_type: str) -> torch.dtype:
    """Return the dtype of gathered parameters and activations."""
    if config.param_dtype != "auto":
        return DTYPES[config.param_dtype]
    return torch.bfloat16 if device_type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """FSDP1 on a mesh of [shards] or [replicas, shards]."""

    config: TrainConfig
    mesh: DeviceMesh
    seed: int | None

    def shard_model(self, blueprint: Blueprint, model: nn.Module) -> nn.Module:
        """Shard `model`. Units are materialized one at a time, and each is sharded before the next."""
        if self.mesh.shape[-1] == 1 or self.config.strategy == "ddp":
            require_no_frozen_fsdp_unit(blueprint, model)
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
            if self.seed is not None or has_values_outside_weights(module):
                whole = draw_initial_parameters(blueprint, names[module], module, self.seed or 0)
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
                sharding_strategy=_STRATEGIES[self.config.strategy],
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

    def clip_gradients(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip gradients to a norm, and return the norm before clipping.

        Uses FSDP1's method: `torch.nn.utils.clip_grad_norm_` would see only the shards of this rank.
        """
        return cast(FullyShardedDataParallel, model).clip_grad_norm_(max_norm)

    def accumulating_gradients(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for all micro-batches but the last.

        With "ddp" gradients stay local until the last. Otherwise each micro-batch reduces them to shards, because
        unsharded gradients may not fit into memory.
        """
        is_replicated = self.config.strategy == "ddp"
        return cast(FullyShardedDataParallel, model).no_sync() if is_replicated else nullcontext()


def require_no_frozen_fsdp_unit(blueprint: Blueprint, model: nn.Module) -> None:
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

    def clip_gradients(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip gradients to a norm, and return the norm before clipping; a collective."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

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
    multiplied, frozen = matmul_and_frozen_numel(model)
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


def matmul_and_frozen_numel(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements of all parameters outside embeddings, and of the frozen ones among them."""
    owners = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    parameters = {parameter for module in owners for parameter in module.parameters(recurse=False)}
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return sum(parameter.numel() for parameter in parameters), frozen
