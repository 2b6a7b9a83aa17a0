"""ZeRO 1 on one rank, saved by the engine's own `save_checkpoint`, with a scheduler and a random state."""

import argparse
import os
import tempfile
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

BATCH, WIDTH, LR = 4, 16, 0.02
SETTINGS = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--forgets-scheduler", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=SETTINGS, dist_init_required=False
    )
    if args.resume:
        _, client = engine.load_checkpoint(
            str(args.resume.parent), args.resume.name, load_lr_scheduler_states=not args.forgets_scheduler
        )
        torch.set_rng_state(client["rng"])
    while engine.global_steps < args.steps:
        batch = torch.randn(BATCH, WIDTH)
        loss = (engine(batch) - batch.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps} loss {loss.item():.8f}", flush=True)  # noqa: T201 - the proof reads it
        if engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(str(args.run), client_state={"rng": torch.get_rng_state()})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as room:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
        dist.init_process_group("gloo", init_method=f"file://{room}/store", rank=0, world_size=1)
        main()
        dist.destroy_process_group()
