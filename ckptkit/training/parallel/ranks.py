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
    """A rank's number among all, its number on this machine, and the URL at which they meet (torch's `init_method`)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str


@contextmanager
def process_group(place: RankPlace, device: str, *, deterministic: bool = False) -> Iterator[DeviceMesh]:
    """Join the other ranks; yield a mesh of one dimension on the device of choice, and leave the group at the end.

    `deterministic` asks a GPU for the same bits each time: its attention else adds up gradients in any order.
    """
    chosen = choose_device(device, place)
    backend = "gloo"
    if chosen.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(chosen)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(backend, init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    done = False
    try:
        # A rank may have joined while another still connects: should it fail and leave at once, so would that one.
        dist.all_reduce(torch.zeros(1))
        yield init_device_mesh(chosen.type, (place.world_size,))
        done = True
    finally:
        # After an error NCCL would wait here for ranks that wait for this one: there the process's end is the end.
        if done or chosen.type == "cpu":
            dist.destroy_process_group()


def choose_device(device: str, place: RankPlace) -> torch.device:
    """Return the device of a rank: by `auto` a GPU of its own if this machine has one for each rank, else the CPU."""
    gpus = torch.cuda.device_count()
    enough = gpus >= place.local_world_size
    if device == "cuda" and not enough:
        raise Usage(
            f"expected {place.local_world_size} GPUs, one for each rank, found {gpus}",
            hint="use `--nproc` with the number of GPUs, or `--device cpu`",
        )
    if device == "cpu" or not enough:
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank)
