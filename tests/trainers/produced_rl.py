"""Trees of trainers for reinforcement learning, made with torch as their sources do it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from tests.producers import Truth, _on_ranks, flatten
from tests.trainers.produced_lightning import Net


def _save_prime_rl(root: Path) -> Mapping[str, Any]:
    """src/prime_rl/trainer/ckpt.py, `AppState` and `save_to_path`, with matrices by Muon and the rest by AdamW."""
    torch.manual_seed(5)
    model = Net()
    fully_shard(model)
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(others, 1e-2)]
    model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    found: Any = get_state_dict(model, optimizers)
    weights, states = found
    progress = {"step": 4, "total_tokens": 640, "total_samples": 8}
    app = {"model": weights, "optimizers": states, "scheduler": {"last_epoch": 4}, "progress": progress}
    place = root / "checkpoints" / "step_4" / "trainer"
    (place / "dataloader").mkdir(parents=True, exist_ok=True)
    torch.save({"rows": dist.get_rank()}, place / "dataloader" / f"rank_{dist.get_rank()}.pt")
    dcp.save({"app": app}, checkpoint_id=place)
    whole = {name: tensor.full_tensor() for name, tensor in weights.items()}
    if dist.get_rank() == 0:
        _orchestrate(root, whole)
    return flatten({"app": {"model": weights, "optimizers": states}})


def _orchestrate(root: Path, weights: dict[str, Tensor]) -> None:
    """src/prime_rl/orchestrator/ckpt.py, `save`; transports/weights/filesystem.py: two broadcasts, one unfinished."""
    (root / "checkpoints" / "step_4" / "orchestrator").mkdir()
    torch.save({"progress": {"step": 4}}, root / "checkpoints" / "step_4" / "orchestrator" / "progress.pt")
    for step in (4, 5):
        place = root / "broadcasts" / f"step_{step}"
        place.mkdir(parents=True)
        save_file(weights, place / "model.safetensors")
    (root / "broadcasts" / "step_4" / "STABLE").touch()


def prime_rl(root: Path) -> Truth:
    """A run of prime-rl on 2 ranks of FSDP2, with Muon and AdamW."""
    return _on_ranks(2, _save_prime_rl, root)
