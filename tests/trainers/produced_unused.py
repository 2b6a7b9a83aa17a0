"""A training on 2 ranks in which one module has no gradient until after the save, and another is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.producers import Truth, _on_ranks

SAVED, LAST = 3, 5  # steps
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """A model whose `spare` is used from step `SAVED` on, and whose `frozen`, if it has that, is never trained."""

    def __init__(self, *, has_frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(4, 6)
        self.spare = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False) if has_frozen else nn.Identity()
        self.head = nn.Linear(6, 3)
        self.register_buffer("counts", torch.arange(3))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        hidden = self.frozen(torch.tanh(self.embed(inputs)))
        return self.head(hidden + self.spare(hidden) if step >= SAVED else hidden)


def begin(*, is_sharded: bool, has_frozen: bool = True) -> tuple[Model, torch.optim.Optimizer]:
    """Return the model, sharded over all ranks or not, and its optimizer, with two groups if something is frozen."""
    model = Model(has_frozen=has_frozen)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [one for one in model.parameters() if one.requires_grad]
    decayed = [one for one in trained if one.ndim > 1]
    others = [one for one in trained if one.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups if has_frozen else trained, lr=0.01)


def train(model: Model, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """Make steps, with the same data on each rank."""
    for step in range(start, stop):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 4), step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, whole."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def _save(root: Path) -> Mapping[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = begin(is_sharded=True)
    train(model, optimizer, 0, SAVED)
    for place, options in (("nested", None), ("flat", FLAT)):
        states = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"model": get_model_state_dict(model), "optimizer": states}, checkpoint_id=root / place)
    train(model, optimizer, SAVED, LAST)
    truth = whole(model)
    numbered, own = begin(is_sharded=True, has_frozen=False)
    train(numbered, own, 0, SAVED)
    (root / "ranks").mkdir(exist_ok=True)
    torch.save(numbered.state_dict(), root / "ranks" / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(own.state_dict(), root / "ranks" / f"optim_world_size_{world}_rank_{rank}.pt")
    train(numbered, own, SAVED, LAST)
    for has_frozen, name in ((False, "numbered.pt"), (True, "frozen.pt")):
        alone, own = begin(is_sharded=False, has_frozen=has_frozen)
        train(alone, own, 0, SAVED)
        if rank == 0:
            torch.save({"model": alone.state_dict(), "optimizer": own.state_dict()}, root / name)
    return truth | {f"numbered.{name}": one for name, one in whole(numbered).items()}


def unused(root: Path) -> Truth:
    """Save on 2 ranks before `spare` had a gradient; give the parameters two steps later."""
    return _on_ranks(2, _save, root)


def resume(root: Path, options: StateDictOptions | None = None, has_frozen: bool = True) -> dict[str, Tensor]:
    """Load a checkpoint as torch does, on any number of ranks, train on, and return the parameters."""
    model, optimizer = begin(is_sharded=True, has_frozen=has_frozen)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": states}
    dcp.load(state, checkpoint_id=root)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    train(model, optimizer, SAVED, LAST)
    return whole(model)


def resume_ranks(root: Path) -> dict[str, Tensor]:
    """Load the files of as many ranks, as their trainer does, train on, and return the parameters."""
    model, optimizer = begin(is_sharded=True, has_frozen=False)
    own = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    model.load_state_dict(torch.load(root / f"model_{own}", weights_only=False))
    states = torch.load(root / f"optim_{own}", weights_only=False)
    assert sorted(states["state"]) == list(range(6))
    optimizer.load_state_dict(states)
    train(model, optimizer, SAVED, LAST)
    return whole(model)
