"""A right training loop: FSDP2 on 2 gloo ranks, saved by DCP. Knows nothing of ckptkit.

The proof's judges run it as it is, and with one line changed (`faults.py`). All ranks draw the same random numbers, and
a global batch is dealt to however many ranks there are, so that the result hardly depends on their number.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,  # noqa: F401 - for a planted fault
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BATCH, BATCHES, WIDTH, LR = 8, 3, 16, 0.02


class Data:
    """Batches in an order that depends on the epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.samples = torch.randn(BATCH * BATCHES, WIDTH, generator=generator)
        self.epoch, self.batch = 0, 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(epoch))

    def next(self) -> Tensor:
        if self.batch == BATCHES:
            self.batch = 0
            self.set_epoch(self.epoch + 1)
        self.batch += 1
        return self.samples[self.order[(self.batch - 1) * BATCH : self.batch * BATCH]]

    def load(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]
        self.set_epoch(state["epoch"])


class Scaler:
    """A loss scale that doubles after two good steps, and halves after gradients that do not fit 16 bits."""

    def __init__(self) -> None:
        self.scale, self.good = 2.0**17, 0  # too large at step 7, where a step is left out

    def update(self, largest: float) -> bool:
        if largest * self.scale > 65504:
            self.scale, self.good = self.scale / 2, 0
            return False
        self.good += 1
        if self.good % 2 == 0:
            self.scale *= 2
        return True


def whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


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
    data, scaler, step = Data(), Scaler(), 0
    ema = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def collect() -> dict[str, Any]:
        return {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "data": {"epoch": data.epoch, "batch": data.batch},
            "scaler": {"scale": scaler.scale, "good": scaler.good},
            "ema": ema,
            "step": step,
        }

    if args.resume:
        state = collect()
        dcp.load(state, checkpoint_id=args.resume)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        scheduler.load_state_dict(state["scheduler"])
        data.load(state["data"])
        scaler.scale, scaler.good = state["scaler"]["scale"], state["scaler"]["good"]
        step = state["step"]
        torch.set_rng_state(state["rng"])
    while step < args.steps:
        batch = data.next()
        mask = (torch.rand(BATCH, WIDTH) > 0.1)[rank :: args.nproc]
        mine = batch[rank :: args.nproc]
        loss = (model(mine * mask) - mine.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        largest = max(whole(parameter.grad).abs().max().item() for parameter in model.parameters())
        if scaler.update(largest):
            optimizer.step()
            scheduler.step()
        step += 1
        for name, parameter in model.named_parameters():
            ema[name].lerp_(parameter.detach(), 0.1)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / args.nproc:.8f}", flush=True)  # noqa: T201 - the proof reads it
        if step % args.save_every == 0:
            dcp.save(collect(), checkpoint_id=f"{args.run}/step_{step}")
    full = {name: whole(parameter) for name, parameter in ema.items()}
    if rank == 0:
        torch.save(full, f"{args.run}/ema.pt")
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
