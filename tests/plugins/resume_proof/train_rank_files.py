"""FSDP2 on 2 gloo ranks. Each rank writes its own files, as verl does: the model, the optimizer and the rest."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

BATCH, WIDTH, LR = 4, 16, 0.02


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.nproc)
    mesh = dist.device_mesh.init_device_mesh("cpu", (args.nproc,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    step = 0
    torch.manual_seed(rank)

    def file(folder: str, kind: str) -> str:
        return f"{folder}/{kind}_world_size_{args.nproc}_rank_{rank}.pt"

    if args.resume:
        set_model_state_dict(model, torch.load(file(args.resume, "model"), weights_only=False))
        set_optimizer_state_dict(model, optimizer, torch.load(file(args.resume, "optim"), weights_only=False))
        extra = torch.load(file(args.resume, "extra_state"), weights_only=False)
        scheduler.load_state_dict(extra["lr_scheduler"])
        torch.set_rng_state(extra["rng"]["cpu"])
        step = scheduler.last_epoch
    while step < args.steps:
        batch = torch.randn(BATCH, WIDTH)
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / args.nproc:.8f}", flush=True)  # noqa: T201 - the proof reads it
        if step % args.save_every == 0:
            half = f"{args.run}/.saving"
            os.makedirs(half, exist_ok=True)
            torch.save(get_model_state_dict(model), file(half, "model"))
            torch.save(get_optimizer_state_dict(model, optimizer), file(half, "optim"))
            extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
            torch.save(extra, file(half, "extra_state"))
            dist.barrier()
            if rank == 0:
                os.rename(half, f"{args.run}/global_step_{step}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as room:
        mp.start_processes(work, (args, f"{room}/store"), nprocs=args.nproc, start_method="fork")
