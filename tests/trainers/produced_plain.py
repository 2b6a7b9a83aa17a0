"""Checkpoints of trainers whose optimizers number their parameters, made by the libraries, or as their scripts do it.

The truth has the optimizer by name, as `get_optimizer_state_dict` gives it of the live run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from tests.producers import Truth, _on_ranks, flatten

STEPS = 2  # before a checkpoint


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What is true of a run in a moment, by name."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return {name: tensor.detach().clone() for name, tensor in flatten(state).items()}


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _train_with_trainer(root: Path) -> Mapping[str, Any]:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    truth: dict[str, Tensor] = {}

    class Witness(TrainerCallback):
        def on_save(self, *_args: Any, **known: Any) -> None:
            optimizer = known["optimizer"]
            truth.update(live_state(known["model"], getattr(optimizer, "optimizer", optimizer)))

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 11}
    config = LlamaConfig(vocab_size=32, max_position_embeddings=16, tie_word_embeddings=False, **sizes)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    settings = {"max_steps": STEPS, "save_steps": STEPS, "weight_decay": 0.1, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(root), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[Witness()]).train()
    return truth


def trainer_ddp(root: Path) -> Truth:
    """Transformers' Trainer under DDP on 2 ranks: `checkpoint-2` in a run; queries and keys have one shape."""
    return _on_ranks(2, _train_with_trainer, root)


# -- nanoGPT -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's block by nanoGPT's names; all square matrices have one shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, width), "c_proj": nn.Linear(width, width)})
        self.attn.register_buffer("bias", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn["c_proj"](self.attn["c_attn"](self.ln_1(hidden)))
        return hidden + self.mlp["c_proj"](self.mlp["c_fc"](self.ln_2(hidden)).relu())


class Gpt(nn.Module):
    """A model by nanoGPT's names, with its tied head and its mask, a buffer that is called `bias`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        blocks = nn.Sequential(*(Block(width) for _ in range(11)))
        embeddings = {"wte": nn.Embedding(16, width), "wpe": nn.Embedding(4, width)}
        self.transformer = nn.ModuleDict({**embeddings, "h": blocks, "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, 16, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(len(tokens)))
        hidden = self.transformer["h"](hidden)
        return self.lm_head(self.transformer["ln_f"](hidden))

    def configure_optimizers(self) -> torch.optim.AdamW:
        """As in nanoGPT's model.py: matrices decay, vectors do not."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        decay = [parameter for parameter in parameters if parameter.dim() >= 2]
        others = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Take steps on data that their numbers tell; return the losses."""
    losses = []
    for step in steps:
        tokens = (torch.arange(4) * 3 + step) % 16
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def nanogpt(root: Path) -> Truth:
    """`ckpt.pt` as nanoGPT's train.py saves it of a compiled model."""
    torch.manual_seed(1)
    model = Gpt()
    optimizer = model.configure_optimizers()
    train(model, optimizer, range(STEPS))
    root.mkdir()
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    counts = {"iter_num": STEPS, "best_val_loss": torch.tensor(1.5), "config": {"dropout": 0.0, "device": "cpu"}}
    saved = {"model": state, "optimizer": optimizer.state_dict(), "model_args": {"n_layer": 11}, **counts}
    torch.save(saved, root / "ckpt.pt")
    return live_state(model, optimizer)


def nanochat(root: Path) -> Truth:
    """Two checkpoints as nanochat's checkpoint_manager.py saves them on 2 ranks, whose optimizer states are slices."""
    root.mkdir()
    torch.manual_seed(2)
    model = Gpt()
    for step in (100, 200):
        torch.save(model.state_dict(), root / f"model_{step:06d}.pt")
        (root / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": {"n_layer": 11}}))
        for rank in range(2):
            states = {0: {"exp_avg": torch.full((8, 8), float(rank)), "step": 3}}
            groups = [{"lr": 0.1, "kind": "adamw", "params": [0]}, {"lr": 0.2, "kind": "muon", "params": [1, 2]}]
            torch.save({"state": states, "param_groups": groups}, root / f"optim_{step:06d}_rank{rank}.pt")
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
