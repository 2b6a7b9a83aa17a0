"""A training with Accelerate, saved by `save_state`, as its documentation shows it."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, BATCHES, WIDTH = 4, 3, 16


class Progress:
    """The number of steps that were taken."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--resume")
    given = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    samples = TensorDataset(torch.randn(BATCH * BATCHES, WIDTH))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if given.resume:
        accelerator.load_state(given.resume)
    while progress.step < given.steps:
        epoch, batch = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for (inputs,) in accelerator.skip_first_batches(loader, batch) if batch else loader:
            loss = (model(inputs) - inputs.flip(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            accelerator.print(f"step {progress.step} loss {loss.item():.8f}", flush=True)
            if progress.step % given.save_every == 0:
                name = f"step_{progress.step}"
                accelerator.save_state(f"{given.run}/.{name}")  # not atomic: a kill leaves some of its files
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    Path(given.run, f".{name}").rename(Path(given.run, name))
            if progress.step == given.steps:
                break


if __name__ == "__main__":
    main()
