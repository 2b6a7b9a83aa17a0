"""Add LoRA adapters to the linear layers of a model: two small trainable matrices each, with the model frozen.

Names, initial values and arithmetic are the same as in PEFT, so PEFT can load the saved adapter. Source:
peft/tuners/lora/layer.py, and `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ckptkit.adapters.config import NAME as ADAPTER_CONFIG
from ckptkit.adapters.config import ends_with_name
from ckptkit.adapters.names import DEFAULT
from ckptkit.errors import Unsupported, Usage
from ckptkit.training.models.blueprint import Blueprint
from ckptkit.training.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings of LoRA adapters: rank, alpha and target layers, by default all linear layers in the blocks.

    A layer is a target if its name equals one of `targets` or ends in `.` and one of them. `seed` initializes the
    adapters.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    seed: int = 0


class LoraMatrix(nn.Linear):
    """A matrix of an adapter.

    A class of its own, so that FSDP1 can wrap it as a unit: its dtype differs from the dtype of its block.
    """


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: `x Wᵀ + scaling * (x Aᵀ) Bᵀ`. The base weight keeps its name."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)  # `nn.Linear.__init__` would allocate another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(linear, name))
        self.lora_A = nn.ModuleDict({DEFAULT: LoraMatrix(self.in_features, lora.rank, bias=False)})
        self.lora_B = nn.ModuleDict({DEFAULT: LoraMatrix(lora.rank, self.out_features, bias=False)})
        self.scaling = lora.alpha / lora.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        update: Tensor = self.lora_B[DEFAULT](self.lora_A[DEFAULT](x))
        return super().forward(x) + update * self.scaling


class LoraBlueprint:
    """The `Blueprint` of a model with LoRA adapters; see `ckptkit.training.models.blueprint`.

    The base parameters are frozen and stored in `dtype`, the dtype to compute in: without updates they need no fp32.
    """

    def __init__(self, base: Blueprint, lora: Lora, dtype: torch.dtype, base_name: str | None) -> None:
        self._base, self._lora, self._dtype, self._base_name = base, lora, dtype, base_name
        self.vocab_size = base.vocab_size
        self.max_length = base.max_length
        self.layers = base.layers
        self.attention_width = base.attention_width
        self.weights = base.weights

    def build(self) -> nn.Module:
        """Build the model with adapters on torch's default device. Raises `Unsupported`."""
        model = self._base.build()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self._dtype)
        targets = self.target_names
        for name, module in list(model.named_modules()):
            if not any(ends_with_name(name, target) for target in targets):
                continue
            if type(module) is not nn.Linear:
                message = f"`{name}` is a `{type(module).__name__}`: only linear layers are given adapters here"
                raise Unsupported(message, hint="pass other layers with --lora-targets")
            model.set_submodule(name, LoraLinear(module, self._lora))
        return model

    def transformer_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self._base.transformer_blocks(model)

    def initialize_direct_tensors(self, name: str, module: nn.Module) -> None:
        """Initialize `module` like the base model; in adapters A like `nn.Linear`, and B to 0."""
        if not isinstance(module, LoraMatrix):
            self._base.initialize_direct_tensors(name, module)
        elif name.endswith(f"lora_B.{DEFAULT}"):
            nn.init.zeros_(module.weight)
        else:
            torch.manual_seed(
                derive_seed(self._lora.seed, name)
            )  # the caller has no seed if the base weights are loaded
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))

    def tie_weights(self, model: nn.Module) -> None:
        self._base.tie_weights(model)

    def compute_logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self._base.compute_logits(model, tokens, positions)

    def model_files(self) -> Mapping[str, bytes]:
        """Return the model's files, and the adapter_config.json with which PEFT loads the adapter."""
        config = {
            "base_model_name_or_path": self._base_name,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": False,
            "init_lora_weights": True,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self._lora.rank,
            "target_modules": list(self.target_names),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }
        return {**self._base.model_files(), ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}

    @cached_property
    def target_names(self) -> tuple[str, ...]:
        """Return the names of the target layers, or the last components of their names.

        Raises `Usage` for a target that matches no module, and `Unsupported` if the blocks have no linear layers.
        """
        with torch.device("meta"):
            model = self._base.build()
        targets = self._lora.targets or linear_layer_suffixes(self._base.transformer_blocks(model))
        for target in targets:
            if not any(ends_with_name(name, target) for name, _ in model.named_modules()):
                known = ", ".join(linear_layer_suffixes([model]))
                message = f"--lora-targets: expected the name of a module, found `{target}`"
                raise Usage(message, hint=f"use one of {known}" if known else None)
        if not targets:
            raise Unsupported(f"found no linear layers to adapt in the blocks of a `{type(model).__name__}`")
        return targets


def linear_layer_suffixes(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the last components of the names of all linear layers in `modules`, such as `q_proj`, without repeats."""
    named = [item for module in modules for item in module.named_modules()]
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name, module in named if type(module) is nn.Linear))
