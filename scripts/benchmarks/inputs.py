"""Write the inputs of the benchmarks, as plain torch writes checkpoints. Run by torchrun; knows nothing of ckptkit."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from scripts.benchmarks.shapes import llama_of

Fill = Callable[[tuple[int, ...]], Tensor]


def make_model(size_gb: float, dtype: torch.dtype, mesh: DeviceMesh, fill: Fill) -> dict[str, DTensor]:
    """Return a model of about that size, sharded along dim 0 as FSDP2 does it; each rank fills only its own rows."""
    shapes = llama_of(size_gb * 1e9 / dtype.itemsize)
    return {name: shard(shape, dtype, mesh, fill) for name, shape in shapes.items()}


def make_training(size_gb: float, dtype: torch.dtype, mesh: DeviceMesh, fill: Fill) -> dict[str, Any]:
    """Return a model with the state of AdamW, of about that size together."""
    model = make_model(size_gb / 3, dtype, mesh, fill)

    def moments(name: str) -> dict[str, Tensor]:
        like = [shard(tuple(model[name].shape), dtype, mesh, fill) for _ in range(2)]
        return {"step": torch.tensor(500.0), "exp_avg": like[0], "exp_avg_sq": like[1]}

    groups = [{"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(model)}]
    return {"model": model, "optim": {"state": {name: moments(name) for name in model}, "param_groups": groups}}


def shard(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh, fill: Fill) -> DTensor:
    """Return a tensor of which this rank has its rows."""
    local = fill((shape[0] // mesh.size(), *shape[1:])).to(dtype)
    return DTensor.from_local(local, mesh, [Shard(0)])


def save(what: str, root: Path, size_gb: float, dtype: torch.dtype, seed: int) -> None:
    """Save random numbers as a model, or as one in training, sharded along dim 0 over all ranks."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "training":
        dcp.save(make_training(size_gb, dtype, mesh, torch.randn), checkpoint_id=root)
        return
    model = make_model(size_gb, dtype, mesh, torch.randn)
    if what == "hf-shards":
        dcp.save(model, storage_writer=HuggingFaceStorageWriter(str(root), save_distributed=True))
    else:
        dcp.save({"model": model}, checkpoint_id=root)


def write_many_chunks(root: Path, chunks: int) -> None:
    """Write the metadata of a checkpoint of `chunks` chunks from 1,000 ranks, and empty files of the right size."""
    ranks, length = min(1000, chunks), 4096
    metadata = Metadata({}, {}, {})
    for i in range(chunks // ranks):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        parts = [ChunkStorageMetadata(torch.Size([rank * 8, 0]), torch.Size([8, 64])) for rank in range(ranks)]
        properties = TensorProperties(dtype=torch.bfloat16)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size([8 * ranks, 64]), parts)
        metadata.planner_data[name] = ("model", name.removeprefix("model."))
        for rank, part in enumerate(parts):
            index = MetadataIndex(name, part.offsets, rank)
            metadata.storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", i * length, length)
    root.mkdir()
    for rank in range(ranks):
        (root / f"__{rank}_0.distcp").touch()
        os.truncate(root / f"__{rank}_0.distcp", length * (chunks // ranks))
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def main() -> None:
    """Parse the command line and save as one of torchrun's ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["sharded", "training", "hf-shards", "many-chunks"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size-gb", type=float, default=1.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=100_000)
    options = parser.parse_args()
    if options.what == "many-chunks":
        write_many_chunks(options.root, options.chunks)
        return
    dist.init_process_group("gloo")
    save(options.what, options.root, options.size_gb, getattr(torch, options.dtype), options.seed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
