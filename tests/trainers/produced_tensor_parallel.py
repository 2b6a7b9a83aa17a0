"""Small models that DeepSpeed's AutoTP cut for 2 ranks of tensor parallelism, by 2 of data, saved by DeepSpeed itself.

The truth has `KIND/NAME` for each tensor: what the ranks had, joined by DeepSpeed's own `ParamAffineMap`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_zero import be_cpu, link_moments, settings

SLICES = 2
RANKS = 2 * SLICES
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]

# by kind: whether its weights are fused, the stage, and what is unusual
KINDS: Mapping[str, tuple[bool, int, tuple[str, ...]]] = {
    "zero1": (False, 1, ("bf16",)),
    "zero2": (True, 2, ()),
    "zero0": (False, 0, ()),
}


class Fused(nn.Module):
    """Gate and up in one weight, of each of which a rank has a part; a bias; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 6)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 32, bias=False)
        self.register_buffer("frequencies", torch.arange(3.0))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        gate, up = self.up(self.embed(input_ids)).chunk(2, dim=-1)
        logits = self.head(self.down(torch.relu(gate) * up))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made: nn.Module = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False))
    return made


def start(kind: str) -> Any:
    """The engine that trains a model of a kind."""
    import deepspeed

    is_fused, stage, flags = KINDS[kind]
    model = Fused() if is_fused else llama()
    own = {"partition_config": {"use_default_specs": False, "layer_specs": SPECS}} if is_fused else {}
    config = settings(stage, flags) | {"tensor_parallel": {"autotp_size": SLICES, **own}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine: Any) -> None:
    for step in range(2):
        tokens = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()


def states(engine: Any) -> Mapping[str, Tensor]:
    """What this rank has of the model and of its moments: slices."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    link_moments(engine.optimizer)
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
        for what in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.state.{name}.{what}"] = safe_get_full_optimizer_state(parameter, what)
    return {name: value.cpu().clone() for name, value in found.items()}


def join(name: str, slices: Mapping[int, Tensor], maps: Mapping[str, Any]) -> Tensor:
    from deepspeed.checkpoint.affine import ParamAffineMap

    own = name.removeprefix("model.") if name.startswith("model.") else name.split(".", 2)[2].rpartition(".")[0]
    found: Tensor = ParamAffineMap.from_dict(maps[f"^{re.escape(own)}$"]).rebuild(dict(slices))
    return found


def save_all(root: Path) -> Mapping[str, Any]:
    """Train a model of each kind and save it."""
    be_cpu()
    truth: dict[str, Tensor] = {}
    for kind, (_, stage, _) in KINDS.items():
        engine = start(kind)
        train(engine)
        engine.save_checkpoint(str(root / kind))
        if not stage:
            continue
        every: list[Mapping[str, Tensor]] = [{} for _ in range(RANKS)]
        dist.all_gather_object(every, states(engine))
        file = root / kind / "global_step2" / "mp_rank_00_model_states.pt"
        maps = torch.load(file, weights_only=False)["universal_checkpoint_info"]["affine_map"]["params"]
        for name in every[0]:
            truth[f"{kind}/{name}"] = join(name, dict(enumerate(one[name] for one in every[:SLICES])), maps)
    return truth


def auto_tp(root: Path) -> Truth:
    """A directory of each kind, by four ranks."""
    return _on_ranks(RANKS, save_all, root)
