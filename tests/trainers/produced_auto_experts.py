"""A small mixture whose experts DeepSpeed's AutoEP fused and dealt out among 2 of 4 ranks, saved by DeepSpeed itself.

The truth has `KIND/NAME` for each tensor; the experts of all ranks follow one another on the first axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_experts import DATA_FIRST, RANKS, forget_groups, train
from tests.trainers.produced_zero import ROWS, WIDTH, be_cpu, link_moments, settings

EXPERTS, INNER, SHARE = 4, 5, 2

# by kind: the stage, and what is unusual
KINDS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "zero0": (0, ()),
    "zero0-bf16": (0, ("bf16",)),
    "zero1": (1, ("bf16",)),
    "zero2": (2, ()),
    "data-first": (2, ("bf16", DATA_FIRST)),
}


class Experts(nn.Module):
    """The weights of all experts, gate and up in one, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)


class Mixture(nn.Module):
    """A layer of experts, which AutoEP puts its own in the place of before it ever runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()


class Layer(nn.Module):
    """A layer with a mixture under the name that transformers gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp: nn.Module = Mixture()

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.mlp(hidden)
        return hidden + (found[0] if isinstance(found, tuple) else found).to(hidden.dtype)


class Model(nn.Module):
    """Two layers of experts between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(model_type="small", num_local_experts=EXPERTS, num_experts_per_tok=2)
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).float()


def start(kind: str) -> Any:
    """The engine that trains a model of a kind."""
    import deepspeed

    stage, flags = KINDS[kind]
    forget_groups()
    config = settings(stage, flags) | ({DATA_FIRST: True} if DATA_FIRST in flags else {})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config["expert_parallel"] = {
        "enabled": True,
        "autoep_size": SHARE,
        "use_grouped_mm": False,
        "moe_layer_pattern": r"layers\.\d+\.mlp",
        "router_pattern": "gate",
        "expert_pattern": "experts",
        "expert_w1": "gate_up_proj",
        "expert_w2": "down_proj",
        "expert_w3": None,
        "num_experts_attr": "num_local_experts",
        "top_k_attr": "num_experts_per_tok",
        "score_func": "softmax",
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def states(engine: Any, stage: int) -> Mapping[str, Tensor]:
    """What this rank has of the model and of its moments."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        master = parameter if stage else master_of(engine, name, parameter)
        found[f"model.{name}"] = safe_get_full_fp32_param(parameter) if stage else master.detach()
        for what in ("exp_avg", "exp_avg_sq"):
            moments = None if stage else getattr(engine.optimizer, "optimizer", engine.optimizer).state[master]
            found[f"optimizer.state.{name}.{what}"] = (
                safe_get_full_optimizer_state(parameter, what) if moments is None else moments[what]
            )
    return {name: value.cpu().clone() for name, value in found.items()}


def master_of(engine: Any, name: str, parameter: Any) -> Any:
    """The master of a parameter without ZeRO: itself, or in 16 bits what the optimizer has in its place."""
    if not engine.bfloat16_enabled():
        return parameter
    names = [name for name, _ in engine.module.named_parameters()]
    names.sort(key=lambda one: ".mlp.experts." in one)  # as in the optimizer's groups
    masters = [master for group in engine.optimizer.fp32_groups for master in group]
    return masters[names.index(name)]


def save_all(root: Path) -> Mapping[str, Any]:
    """Train a model of each kind and save it."""
    be_cpu()
    truth: dict[str, Tensor] = {}
    for kind, (stage, flags) in KINDS.items():
        engine = start(kind)
        train(engine, 2)
        engine.save_checkpoint(str(root / kind))
        link_moments(engine.optimizer)
        every: list[Mapping[str, Tensor]] = [{} for _ in range(RANKS)]
        dist.all_gather_object(every, states(engine, stage))
        owners = every[:: RANKS // SHARE] if DATA_FIRST in flags else every[:SHARE]
        for name in every[0]:
            is_experts = ".mlp.experts." in name
            truth[f"{kind}/{name}"] = torch.cat([one[name] for one in owners]) if is_experts else every[0][name]
    return truth


def auto_experts(root: Path) -> Truth:
    """A directory of each kind, by four ranks."""
    return _on_ranks(RANKS, save_all, root)
