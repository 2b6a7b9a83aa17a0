"""Join the ranks of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptkit.errors import Usage


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank, its local rank on this machine, and the URL of the rendezvous (torch's `init_method`)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str


@contextmanager
def process_group(place: RankPlace, device: str, *, deterministic: bool = False) -> Iterator[DeviceMesh]:
    """Initialize the process group, yield a one-dimensional mesh, and destroy the group at the end.

    The device "auto" is a GPU if this machine has one for each of its ranks, else the CPU.
    `deterministic` makes results on a GPU repeatable bit for bit where torch can: attention otherwise adds up gradients
    in varying order.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < place.local_world_size:
        raise Usage(
            f"expected {place.local_world_size} GPUs, one for each rank, found {gpus}",
            hint="pass --nproc with the number of GPUs, or --device cpu",
        )
    device_type, backend = "cpu", "gloo"
    if device != "cpu" and gpus >= place.local_world_size:
        device_type, backend = "cuda", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(place.local_rank)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(backend, init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    done = False
    try:
        # Wait until all ranks are connected: if a rank fails and exits while another still connects, both fail.
        dist.all_reduce(torch.zeros(1))
        yield init_device_mesh(device_type, (place.world_size,))
        done = True
    finally:
        # After an error NCCL would deadlock here, because other ranks wait for this rank: the process exit ends it.
        if done or device_type == "cpu":
            dist.destroy_process_group()
