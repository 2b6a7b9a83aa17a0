"""Models with experts, saved by DeepSpeed itself on four ranks, with the state that the engine had when it saved them.

The truth has `KIND/NAME` for each tensor; experts are numbered through all ranks in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_zero import ROWS, WIDTH, be_cpu, link_moments, live_state, settings

RANKS = 4
DATA_FIRST = "use_data_before_expert_parallelism"

# by kind: the stage, among how many ranks experts are dealt out, how many there are, and what is unusual
KINDS: Mapping[str, tuple[int, int, tuple[int, int], tuple[str, ...]]] = {
    "zero0": (0, 2, (4, 4), ()),
    "zero0-bf16": (0, 2, (4, 2), ("bf16",)),
    "zero1": (1, 2, (4, 2), ("bf16",)),
    "zero2": (2, 2, (2, 4), ()),
    "data-first": (2, 2, (4, 4), ("bf16", DATA_FIRST)),
    "all-alike": (2, 1, (3, 3), ("fp16",)),
    "none-alike": (1, 4, (4, 8), ()),
    "round-robin": (2, 2, (2, 4), ("round_robin_gradients",)),
    "bf16-optimizer": (1, 2, (4, 4), ("bf16", "accumulated")),
    "residual": (1, 2, (2, 2), ("residual", "frozen")),
}


class Expert(nn.Module):
    """An expert of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(hidden.to(self.up.weight.dtype)))) * self.scale


class Model(nn.Module):
    """A model with two layers of experts."""

    def __init__(self, ranks: tuple[int, int], counts: tuple[int, int], flags: tuple[str, ...]) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, WIDTH)
        is_residual = "residual" in flags
        pairs = zip(counts, ranks, strict=True)
        layers = [MoE(WIDTH, Expert(), n, among, use_residual=is_residual, min_capacity=2) for n, among in pairs]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        torch.manual_seed(1 + dist.get_rank() % max(ranks))
        for name, parameter in self.named_parameters():
            if ".deepspeed_experts." in name:  # or ranks would have the same experts
                parameter.data = torch.randn_like(parameter) / 3
                if "frozen" in flags and name.endswith("up.bias"):
                    parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0].to(hidden.dtype)
        return self.head(self.norm(hidden)).float()


def start(stage: int, ranks: tuple[int, int], counts: tuple[int, int], flags: tuple[str, ...]) -> Any:
    """The engine that trains a model, whose layers have `counts` experts, split among `ranks` ranks."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    forget_groups()
    model = Model(ranks, counts, flags)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(split({"params": trained, "name": "shared"}), lr=1e-2)
    config = settings(stage, flags) | ({DATA_FIRST: True} if DATA_FIRST in flags else {})
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def forget_groups() -> None:
    """Let DeepSpeed make groups of ranks anew: those of a name it makes once for each process."""
    from deepspeed.utils import groups

    for found in vars(groups).values():
        if isinstance(found, dict) and any(str(name).startswith("ep_size_") for name in found):
            found.clear()


def train(engine: Any, steps: int) -> None:
    """Make some steps, each rank with data of its own."""
    for step in range(steps):
        noise = torch.Generator().manual_seed(RANKS * step + dist.get_rank())
        tokens = torch.randint(0, ROWS, (2, 5), generator=noise)
        loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()


def states(engine: Any, stage: int, flags: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """What this rank has of the model and the optimizer, experts numbered from 0."""
    found = dict(live_state(engine.module, stage, flags))
    yield from found.items()
    for name, value in engine.module.state_dict().items():
        trained = dict(engine.module.named_parameters()).get(name)
        is_master = not engine.bfloat16_enabled() or trained is None or not trained.requires_grad
        if f"model.{name}" not in found and is_master:
            yield f"model.{name}", value
    if not stage and not engine.bfloat16_enabled():
        for name, parameter in engine.module.named_parameters():
            for what in ("exp_avg", "exp_avg_sq", "step"):
                yield f"optimizer.state.{name}.{what}", engine.optimizer.state[parameter][what]
    if not stage and engine.bfloat16_enabled():
        names = [name for group in grouped(engine.module) for name in group]
        masters = [master for group in engine.optimizer.fp32_groups for master in group]
        for name, master in zip(names, masters, strict=True):
            yield f"model.{name}", master
            for what in ("exp_avg", "exp_avg_sq"):
                yield f"optimizer.state.{name}.{what}", engine.optimizer.optimizer.state[master][what]


def grouped(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of parameters that all ranks have, and those of experts'."""
    names = [name for name, _ in model.named_parameters()]
    return (
        [name for name in names if ".deepspeed_experts." not in name],
        [name for name in names if ".deepspeed_experts." in name],
    )


def through_all(name: str, counts: tuple[int, int], ranks: int, rank: int) -> str:
    """A name with the number of an expert among all instead of that on a rank."""
    before, dot, rest = name.partition(".deepspeed_experts.")
    if not dot:
        return name
    layer = int(before.split("layers.")[1].split(".")[0])
    number, _, rest = rest.partition(".")
    return f"{before}{dot}{rank * (counts[layer] // ranks) + int(number)}.{rest}"


def save_all(root: Path) -> Mapping[str, Any]:
    """Train a model of each kind and save it."""
    be_cpu()
    truth: dict[str, Tensor] = {}
    for kind, (stage, ranks, counts, flags) in KINDS.items():
        engine = start(stage, (ranks, ranks), counts, flags)
        train(engine, 2)
        engine.save_checkpoint(str(root / kind), client_state={"my_epoch": 1})
        link_moments(engine.optimizer)
        place = dist.get_rank() // (RANKS // ranks) if DATA_FIRST in flags else dist.get_rank() % ranks
        own = {through_all(name, counts, ranks, place): value for name, value in states(engine, stage, flags)}
        every: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
        dist.all_gather_object(every, {name: value.detach().cpu().clone() for name, value in own.items()})
        truth |= {f"{kind}/{name}": value for one in reversed(every) for name, value in one.items()}
    return truth


def experts(root: Path) -> Truth:
    """A directory of each kind, by four ranks."""
    return _on_ranks(RANKS, save_all, root)


def save_mixed(root: Path) -> Mapping[str, Any]:
    """Train and save models whose layers split their experts among different numbers of ranks."""
    be_cpu()
    for kind, counts in {"mixed": (4, 4), "mixed-few": (2, 4)}.items():
        engine = start(0, (2, 4), counts, ("bf16",))
        train(engine, 2)
        engine.save_checkpoint(str(root / kind))
    return {}


def mixed_experts(root: Path) -> Truth:
    """A directory of each kind, by four ranks."""
    return _on_ranks(RANKS, save_mixed, root)
