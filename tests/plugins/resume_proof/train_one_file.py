"""A training that writes each checkpoint over the one before, with the entries that nanoGPT saves.

Like nanoGPT it computes the learning rate from the step, and saves no random state, from which it draws its batches.
With --saves-random-state it resumes bit for bit.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, LR = 16, 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out_dir", type=Path, required=True)
    parser.add_argument("--max_iters", type=int, required=True)
    parser.add_argument("--eval_interval", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--saves-random-state", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    step = 0
    if given.resume:
        state = torch.load(given.out_dir / "ckpt.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["iter_num"]
        if given.saves_random_state:
            torch.set_rng_state(state["rng"])
    while step < given.max_iters:
        optimizer.param_groups[0]["lr"] = LR / (1 + 0.3 * step)
        batch = torch.randn(4, WIDTH)
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.2)  # as steps of a larger model take: a checkpoint is copied before the next replaces it
        print(f"iter {step}: loss {loss.item():.8f}", flush=True)  # noqa: T201 - the proof reads it
        if step % given.eval_interval == 0:
            entries = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "model_args": {"n_embd": WIDTH},
                "iter_num": step,
                "best_val_loss": 1e9,
            }
            if given.saves_random_state:
                entries["rng"] = torch.get_rng_state()
            torch.save(entries, given.out_dir / "ckpt.pt")


if __name__ == "__main__":
    main()
