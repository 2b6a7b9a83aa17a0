"""Write a file of torch.save for each rank, run by torchrun; and merge such files by loading all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from scripts.benchmarks.inputs import make_model


def save(root: Path, size_gb: float) -> None:
    """Save a model's shards, each rank its own, as an FSDP2 model's `state_dict()` has them."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    root.mkdir(parents=True, exist_ok=True)
    model = make_model(size_gb, torch.float32, mesh, torch.randn)
    torch.save(model, root / f"model_world_size_{world}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def merge(src: Path, out: Path) -> None:
    """Load the files of all ranks, and write each tensor joined."""
    files = sorted(src.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    states = [torch.load(path, map_location="cpu", weights_only=False) for path in files]
    whole = {}
    for name in list(states[0]):
        shards = [state.pop(name) for state in states]
        whole[name] = torch.cat([shard._local_tensor for shard in shards], dim=shards[0].placements[0].dim)
    out.mkdir(parents=True, exist_ok=True)
    save_file(whole, out / "model.safetensors")


def main() -> None:
    """Parse the command line, and save or merge."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="what", required=True)
    saving = commands.add_parser("save")
    saving.add_argument("root", type=Path)
    saving.add_argument("--size-gb", type=float, default=1.0)
    merging = commands.add_parser("merge")
    merging.add_argument("src", type=Path)
    merging.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.what == "save":
        save(options.root, options.size_gb)
    else:
        merge(options.src, options.out)


if __name__ == "__main__":
    main()
