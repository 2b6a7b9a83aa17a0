"""What ranks do in `scripts/bench load`, `save` and `reshard`: run by torchrun, a rank each, in calls of torch's.

Only the calls are measured, from when all ranks begin until the last is done.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint import HuggingFaceStorageWriter as HuggingFaceWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ckptkit import storage
from scripts.bench_inputs import make_model, make_training

READERS: dict[str, Callable[[str], Any]] = {
    "dcp": FileSystemReader,
    "ckptkit": storage.Reader,
    "hf": HuggingFaceStorageReader,
}


def load(options: argparse.Namespace) -> float:
    """Load a DCP checkpoint, or a Hugging Face model, into a model sharded over the ranks."""
    model = empty(make_model, options)
    state = {"model": model} if (options.src / ".metadata").exists() else model
    reader = READERS[options.by](str(options.src))
    seconds = timed(lambda: dcp.load(state, storage_reader=reader))
    require_loaded(model)
    return seconds


def save(options: argparse.Namespace) -> float:
    """Save a model, loaded from a DCP checkpoint, that is sharded over the ranks."""
    model = empty(make_model, options)
    dcp.load({"model": model}, storage_reader=storage.Reader(options.src))
    require_loaded(model)
    out, sync = options.out, not options.no_sync
    if options.by == "dcp":
        return timed(lambda: dcp.save(model, storage_writer=FileSystemWriter(out / "new", sync_files=sync)))
    if options.by == "ckptkit":
        return timed(lambda: dcp.save(model, storage_writer=storage.Writer(out / "new", "hf", sync=sync)))
    if options.by == "hf":
        writer = HuggingFaceWriter(str(out / "new"), save_distributed=True, enable_consolidation=True)
        return timed(lambda: dcp.save(model, storage_writer=writer))
    return timed(lambda: save_then_consolidate(model, out))


def save_then_consolidate(model: dict[str, Any], out: Path) -> None:
    """Save shards, and consolidate them by all ranks: a file each, which is all that torch's code can share out."""
    files = {name: 1 + i % dist.get_world_size() for i, name in enumerate(model)}
    dcp.save(model, storage_writer=HuggingFaceWriter(str(out / "shards"), files, save_distributed=True))
    consolidate_safetensors_files_on_every_rank(str(out / "shards"), str(out), files)


def reshard(options: argparse.Namespace) -> float:
    """Load a checkpoint with an optimizer's state on these ranks, and save it again."""
    state = empty(make_training, options)

    def load_and_save() -> None:
        dcp.load(state, checkpoint_id=options.src)
        dcp.save(state, checkpoint_id=options.out / "new")

    seconds = timed(load_and_save)
    require_loaded(state["model"])
    return seconds


def empty(make: Callable[..., dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """A state without any number in it, sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = getattr(torch, options.dtype)
    return make(options.size_gb, dtype, mesh, lambda shape: torch.full(shape, torch.nan, dtype=dtype))


def require_loaded(model: dict[str, DTensor]) -> None:
    """Raise unless every element is a number."""
    for name, tensor in model.items():
        if not finite(tensor.to_local()):
            raise SystemExit(f"{name} was not loaded whole")


def finite(tensor: Tensor) -> bool:
    """True if every element is a number."""
    return all(bool(part.isfinite().all()) for part in torch.split(tensor, 1 << 10))


def timed(work: Callable[[], None]) -> float:
    """Seconds from when all ranks begin until the last of them is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def tell(seconds: float) -> None:
    """Let rank 0 say how long it took, and how much memory all ranks together had at most."""
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    dist.all_reduce(peak)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "peak": peak.item()}))


def main() -> None:
    """Do the work of one of torchrun's ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["load", "save", "reshard"])
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--by", choices=["dcp", "ckptkit", "hf", "hf-later"])
    parser.add_argument("--size-gb", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--no-sync", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    tell({"load": load, "save": save, "reshard": reshard}[options.what](options))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads, which DTensor keeps alive, now and then abort a process that ends by itself


if __name__ == "__main__":
    main()
