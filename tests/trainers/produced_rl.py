"""Trees of trainers for reinforcement learning, made with torch as their sources do it."""

from __future__ import annotations

import json
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
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.producers import Truth, _on_ranks, flatten
from tests.trainers import produced_ranks
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


class Dion(torch.optim.Optimizer):
    """The states of microsoft/dion 0a059a4: `Q` of its dion.py, `variance_neuron` of normuon.py, AdamW for the rest."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2, "mu": 0.95, "algorithm": "dion", "step": 1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["momentum"] = weight.grad.clone()
                if group["algorithm"] == "dion":
                    self.state[weight]["variance_neuron"] = weight.grad[..., :1].square()
                    q = torch.randn(weight.shape[1], 3, generator=torch.Generator().manual_seed(1))
                    self.state[weight]["Q"] = distribute_tensor(q, weight.device_mesh, [Replicate()])
                else:
                    self.state[weight]["variance"] = weight.grad.square()


def _save_miles(root: Path) -> Mapping[str, Any]:
    """miles/backends/fsdp_utils/checkpoint.py, `save`, in DCP; miles/rollout/data_source.py: the place in the data."""
    model = produced_ranks.sharded()
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "layers" in name]
    others = [weight for weight in model.parameters() if all(weight is not one for one in matrices)]
    optimizer = Dion([{"params": matrices}, {"params": others, "algorithm": "adamw"}])
    x = torch.arange(5)
    model(x).sum().backward()
    optimizer.step()
    found: Any = get_state_dict(model, optimizer)
    weights, states = found
    place = root / "iter_0000004"
    dcp.save({"model_state": {"model": weights}}, checkpoint_id=place / "model")
    dcp.save({"optim_state": {"optim": states}}, checkpoint_id=place / "optimizer")
    dcp.save({"lr_scheduler_state": {"lr_scheduler": {"last_epoch": 4}}}, checkpoint_id=place / "lr_scheduler")
    if dist.get_rank() == 0:
        torch.save({"torch": torch.get_rng_state(), "cuda": []}, place / "rng.pt")
        (place / "meta.json").write_text(json.dumps({"iteration": 4, "world_size": 2}))
        (root / "latest_checkpointed_iteration.txt").write_text("4")
        (root / "rollout").mkdir()
        torch.save({"sample_offset": 3}, root / "rollout" / "global_dataset_state_dict_3.pt")
    return flatten({"model_state": {"model": weights}, "optim_state": {"optim": states}})


def _save_skyrl(root: Path) -> Mapping[str, Any]:
    """fsdp_strategy.py, `save_checkpoint`, and trainer.py, `save_checkpoints`, of SkyRL."""
    model = produced_ranks.sharded()
    optimizer = produced_ranks.adamw(model)
    produced_ranks.train(model, optimizer)
    rank, world, step = dist.get_rank(), dist.get_world_size(), root / "global_step_8"
    own = {"tag": None, "fsdp_strategy": "fsdp2", "world_size": world, "rank": rank}
    extra = {"lr_scheduler": {"last_epoch": 2}, "client_state": {}, **own, "rng": {"cpu": torch.get_rng_state()}}
    (step / "policy" / "huggingface").mkdir(parents=True, exist_ok=True)
    for what, value in (("model", model.state_dict()), ("optim", optimizer.state_dict()), ("extra_state", extra)):
        torch.save(value, step / "policy" / f"{what}_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        config = {"fsdp_strategy": "fsdp2", "world_size": world}
        (step / "policy" / "fsdp_config.json").write_text(json.dumps(config))
        for name in ("data.pt", "trainer_state.pt", "fully_async_state.pt"):
            torch.save({"global_step": 8}, step / name)
        (root / "latest_ckpt_global_step.txt").write_text("8")
    return {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}


def _save_both(root: Path) -> Mapping[str, Any]:
    found = {"miles": _save_miles(root / "miles"), "skyrl": _save_skyrl(root / "skyrl")}
    return {f"{trainer}/{name}": value for trainer, state in found.items() for name, value in state.items()}


def miles_and_skyrl(root: Path) -> Truth:
    """A run of each on 2 ranks of FSDP2; the truth has what is in them by `TRAINER/NAME`."""
    return _on_ranks(2, _save_both, root)
