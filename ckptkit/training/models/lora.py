"""Put adapters beside a model's linear layers: two small matrices each, that are trained while the model stays.

Names, first values and arithmetic are those of PEFT, so that what is saved is its adapter. Source:
peft/tuners/lora/layer.py, and `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.adapters.config import NAME as ADAPTER_CONFIG
from ckptkit.adapters.names import DEFAULT
from ckptkit.errors import Unsupported, Usage
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.seeds import derive


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters that are asked for: their rank, alpha, and the layers that have one; by default all in the blocks.

    A layer is a target if its name is one of `targets`, or ends in one. `seed` gives the first values.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    seed: int = 0


class LoraMatrix(nn.Linear):
    """A matrix of an adapter. A class by itself, since FSDP1 makes a unit of it: of another dtype than its block's."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It gives `x W' + scaling * (x A') B'`; its own weight keeps its name."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)  # not Linear's, which would make another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(linear, name))
        self.lora_A = nn.ModuleDict({DEFAULT: LoraMatrix(self.in_features, lora.rank, bias=False)})
        self.lora_B = nn.ModuleDict({DEFAULT: LoraMatrix(lora.rank, self.out_features, bias=False)})
        self.scaling = lora.alpha / lora.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        change: Tensor = self.lora_B[DEFAULT](self.lora_A[DEFAULT](x))
        return super().forward(x) + change * self.scaling


class LoraBlueprint:
    """A model with adapters as the loop knows a model: see `ckptkit.training.models.blueprint`.

    The model's own parameters are frozen and held in `dtype`, that of their use: no update needs more digits of them.
    """

    def __init__(self, base: Blueprint, lora: Lora, dtype: torch.dtype, base_name: str | None) -> None:
        self._base, self._lora, self._dtype, self._base_name = base, lora, dtype, base_name
        self.vocab_size = base.vocab_size
        self.max_length = base.max_length
        self.layers = base.layers
        self.attention_width = base.attention_width
        self.weights = base.weights

    def build(self) -> nn.Module:
        """Build the model with adapters on torch's default device."""
        model = self._base.build()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self._dtype)
        for name, linear in list(find_linear(model, self.targets)):
            model.set_submodule(name, LoraLinear(linear, self._lora))
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self._base.blocks(model)

    def initialize(self, name: str, module: nn.Module) -> None:
        """Initialize `module` as the model would; of an adapter, A as torch initializes a linear layer, and B to 0."""
        if not isinstance(module, LoraMatrix):
            self._base.initialize(name, module)
        elif name.endswith(f"lora_B.{DEFAULT}"):
            nn.init.zeros_(module.weight)
        else:
            torch.manual_seed(derive(self._lora.seed, name))  # the caller has no seed where a model is to be loaded
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))

    def tie(self, model: nn.Module) -> None:
        """Tie again what was tied."""
        self._base.tie(model)

    def logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return logits [batch, length, vocab_size] of int64 token ids [batch, length], each document's its own."""
        return self._base.logits(model, tokens, positions)

    def files(self) -> Mapping[str, bytes]:
        """Return the model's files, and the config with which PEFT opens the adapter."""
        return {**self._base.files(), ADAPTER_CONFIG: (json.dumps(self._config(), indent=2) + "\n").encode()}

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Return the names of the layers that have an adapter, or the ends of their names."""
        with torch.device("meta"):
            model = self._base.build()
        found = self._lora.targets or last_parts(self._base.blocks(model))
        for target in found:
            if not any(is_called(name, target) for name, _ in model.named_modules()):
                known = ", ".join(last_parts([model]))
                raise Usage(f"no module is called `{target}`", hint=f"use one of {known}" if known else None)
        if not found:
            raise Unsupported(f"found no linear layers to adapt in the blocks of a `{type(model).__name__}`")
        return found

    def _config(self) -> dict[str, Any]:
        return {
            "base_model_name_or_path": self._base_name,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": False,
            "init_lora_weights": True,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self._lora.rank,
            "target_modules": list(self.targets),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }


def find_linear(model: nn.Module, targets: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the modules that are targets, by name. Raises `Unsupported` for one that is no plain linear layer."""
    for name, module in model.named_modules():
        if not any(is_called(name, target) for target in targets):
            continue
        if type(module) is not nn.Linear:
            message = f"`{name}` is a `{type(module).__name__}`: only linear layers are given adapters here"
            raise Unsupported(message, hint="name others with `--lora-targets`")
        yield name, module


def is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def last_parts(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    named = [item for module in modules for item in module.named_modules()]
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name, module in named if type(module) is nn.Linear))
