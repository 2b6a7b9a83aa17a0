"""Ranks: the process group, the device, and a model sharded before it is ever whole. Knows no files and no steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptkit.errors import CkptError, Usage
from ckptkit.train.config import ModelConfig
from ckptkit.train.model import Llama, initial_weight

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its number of how many, the same on this machine, and the URL at which they meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    meeting: str


@contextmanager
def process_group(place: Place, device: str) -> Iterator[DeviceMesh]:
    """Join the other ranks; yields a mesh of one dimension on the device of choice, and leaves the group at the end."""
    chosen = choose_device(device, place)
    backend = "gloo"
    if chosen.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(chosen)
        # A resumed run promises the same bits. CUDA's attention adds up its gradients in any order unless told.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(backend, init_method=place.meeting, rank=place.rank, world_size=place.world_size)
    done = False
    try:
        yield init_device_mesh(chosen.type, (place.world_size,))
        done = True
    finally:
        # After an error NCCL would wait here for ranks that wait for this one: there the process's end is the end.
        if done or chosen.type == "cpu":
            dist.destroy_process_group()


def choose_device(device: str, place: Place) -> torch.device:
    """The device of a rank: by `auto` a GPU of its own where this machine has one for each rank, else the CPU."""
    gpus = torch.cuda.device_count()
    enough = gpus >= place.local_world_size
    if device == "cuda" and not enough:
        raise Usage(
            f"{place.local_world_size} ranks need a GPU each; this machine has {gpus}",
            hint="use `--nproc` with the number of GPUs, or `--device cpu`",
        )
    if device == "cpu" or not enough:
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank)


def on_rank_0(work: Callable[[], T]) -> T:
    """Do `work` on rank 0 and give its result to every rank; a CkptError raised there is raised on every rank."""
    outcome: list[T | CkptError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except CkptError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    result = outcome[0]
    if isinstance(result, CkptError):
        raise result
    return result  # type: ignore[return-value]


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
