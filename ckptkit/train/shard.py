"""Sharding: a model built on no device, sharded, and only then given memory and weights. Knows no files and no steps."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptkit.train.llama import Llama, initial_weight
from ckptkit.train.model_config import ModelConfig


def build_model(config: ModelConfig, seed: int, mesh: DeviceMesh) -> Llama:
    """A sharded model in fp32 with the weights of `seed`, the same at any world size; no rank ever holds it whole."""
    with torch.device("meta"):
        model = Llama(config)
    policy = precision(mesh)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    model.restore()
    initialise(model, seed)
    return model


def precision(mesh: DeviceMesh) -> MixedPrecisionPolicy:
    """Compute in bf16 and reduce gradients in fp32 where the device likes bf16; shards and optimizer stay fp32."""
    if mesh.device_type == "cuda" and torch.cuda.is_bf16_supported():
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


@torch.no_grad()
def initialise(model: Llama, seed: int) -> None:
    """Give every parameter its initial weight: each rank makes the whole tensor, one at a time, and keeps its shard."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = initial_weight(name, parameter.shape, model.config, seed).to(parameter.device)
        # src_data_rank=None: every rank cuts its own copy, nothing is sent.
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
