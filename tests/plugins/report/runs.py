"""A run as a page is made of it: metrics with all that goes wrong, checkpoints whole and unfinished, hostile names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from ckptkit.conversion.convert import reshard
from ckptkit.runs.pin import pin
from ckptkit.runs.retention import dump_metrics
from ckptkit.trainers.ckptkit import METRICS
from tests.producers import save_alone

HOSTILE = "<script>document.title='caught'</script><img src=x onerror=alert(1)>"
LAYERS = 4


def make_run(root: Path) -> Path:
    """Steps 1 to 60, of which some were taken again, with checkpoints at 20, 40 and 60, and an unfinished one at 50."""
    save_alone(
        {"model": weights(), "optim": {"state": {"embed.weight": {"exp_avg": torch.zeros(64, 8)}}}}, root / "one"
    )
    for step in (20, 40, 60):
        reshard(root / "one", root / f"ckpt-{step}", to=3)
        (root / f"ckpt-{step}" / METRICS).write_bytes(dump_metrics(step, {"loss": 6 - step / 20}))
    shutil.rmtree(root / "one")
    shutil.copytree(root / "ckpt-40", root / "ckpt-50")
    (root / "ckpt-50" / ".metadata").unlink()
    pin(root / "ckpt-20")
    (root / "train.toml").write_text('model = "tiny"\nsteps = 80\nlr = 0.001\nstrategy = "full_shard"\n')
    (root / "metrics.jsonl").write_text("".join(f"{line}\n" for line in log_lines()))
    return root


def weights() -> dict[str, torch.Tensor]:
    """A model of some layers, and a tensor whose name is an attack."""
    tensors = {"embed.weight": torch.arange(512.0).reshape(64, 8), HOSTILE: torch.ones(3, 5)}
    for layer in range(LAYERS):
        tensors[f"layers.{layer}.attn.weight"] = torch.full((8, 8), 1.0 + layer)
        tensors[f"layers.{layer}.norm.weight"] = torch.ones(8)
    return tensors


def log_lines() -> list[str]:
    """A line for each step; one was not finite, ten were taken again, one is broken."""
    steps = [*range(1, 51), *range(41, 61)]
    entries = [
        {
            "step": step,
            "loss": float("nan") if step == 13 else 6 - step / 20,
            "lr": 0.001 * min(1, step / 10),
            "grad_norm": 10.0 ** (2 - step / 15),
            "tokens": 2048 * step,
            "tokens_per_second": 30_000.0 + step,
            "checkpoint": None,
        }
        for step in steps
    ]
    return [*map(json.dumps, entries), "this is no step"]
