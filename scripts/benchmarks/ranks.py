"""Load, save and reshard in calls of torch's, by several ranks: for `scripts/bench load`, `save` and `reshard`.

Only the calls are measured, from when all ranks begin until the last is done.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint import HuggingFaceStorageWriter as HuggingFaceWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptkit import storage
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from scripts.benchmarks.inputs import make_model, make_training

READ_BYTES = 1 << 19
READERS: dict[str, Callable[[str], Any]] = {
    "dcp": FileSystemReader,
    "ckptkit": storage.Reader,
    "hf": HuggingFaceStorageReader,
}
STORE_WRITERS: dict[str, Callable[[str], Any]] = {"fsspec": FsspecWriter, "store": storage.Writer}


def load(mesh: DeviceMesh, options: argparse.Namespace) -> float:
    """Load a DCP checkpoint, or a Hugging Face model, into a model sharded over the ranks."""
    model = empty(make_model, mesh, options)
    if options.by == "preadv":
        return timed(lambda: read_alone(model, sorted(options.src.iterdir())))
    state = {"model": model} if (options.src / ".metadata").exists() else model
    reader = READERS[options.by](str(options.src))
    seconds = timed(lambda: dcp.load(state, storage_reader=reader))
    require_loaded(model)
    return seconds


def read_alone(model: dict[str, DTensor], files: list[Path]) -> None:
    """Fill this rank's part of the model with as many bytes of its share of the files, whatever they mean."""
    own = files[len(files) * dist.get_rank() // dist.get_world_size() :]
    opened = [os.open(path, os.O_RDONLY) for path in (*own, *files)]
    number = offset = 0
    for tensor in model.values():
        memory = tensor.to_local().reshape(-1).view(torch.uint8).numpy().data
        at = 0
        while at < len(memory):
            count = os.preadv(opened[number], [memory[at : at + READ_BYTES]], offset)
            at, offset = at + count, offset + count
            if not count:
                number, offset = number + 1, 0


def save(mesh: DeviceMesh, options: argparse.Namespace) -> float:
    """Save a model, loaded from a DCP checkpoint, that is sharded over the ranks."""
    model = empty(make_model, mesh, options)
    dcp.load({"model": model}, storage_reader=storage.Reader(options.src))
    require_loaded(model)
    out, sync = options.out, not options.no_sync
    if options.by in STORE_WRITERS:
        return timed(lambda: dcp.save(model, storage_writer=STORE_WRITERS[options.by](options.url)))
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


def reshard(mesh: DeviceMesh, options: argparse.Namespace) -> float:
    """Load a checkpoint with an optimizer's state on these ranks, and save it again."""
    state = empty(make_training, mesh, options)

    def load_and_save() -> None:
        dcp.load(state, checkpoint_id=options.src)
        dcp.save(state, checkpoint_id=options.out / "new")

    seconds = timed(load_and_save)
    require_loaded(state["model"])
    return seconds


def empty(make: Callable[..., dict[str, Any]], mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    """Return a state without any number in it, sharded over all ranks."""
    dtype = getattr(torch, options.dtype)
    return make(
        options.size_gb, dtype, mesh, lambda shape: torch.full(shape, torch.nan, dtype=dtype, device=mesh.device_type)
    )


def require_loaded(model: dict[str, DTensor]) -> None:
    """Raise unless every element is a number."""
    for name, tensor in model.items():
        if not finite(tensor.to_local()):
            raise SystemExit(f"{name} was not loaded whole")


def finite(tensor: Tensor) -> bool:
    """Return True if every element is a number."""
    return all(bool(part.isfinite().all()) for part in torch.split(tensor, 1 << 10))


def timed(work: Callable[[], None]) -> float:
    """Return the seconds from when all ranks begin until the last of them is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


WORKS = {"load": load, "save": save, "reshard": reshard}


def work(options: argparse.Namespace, place: RankPlace, report: Report) -> None:
    """Do the work of one rank; rank 0 reports its seconds, and the memory of all ranks together in MiB."""
    with process_group(place, options.device) as mesh:
        seconds = WORKS[options.what](mesh, options)
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        dist.all_reduce(peak)
        if place.rank == 0:
            report({"seconds": seconds, "peak": peak.item()})


def main() -> None:
    """Parse the command line, start the ranks and print what they report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=WORKS)
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--url")
    parser.add_argument("--by", choices=["dcp", "ckptkit", "hf", "hf-later", "preadv", *STORE_WRITERS])
    parser.add_argument("--size-gb", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-sync", action="store_true")
    options = parser.parse_args()
    launch(partial(work, options), options.ranks, lambda facts: print(json.dumps(facts)))


if __name__ == "__main__":
    main()
