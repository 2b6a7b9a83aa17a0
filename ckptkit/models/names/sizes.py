"""The sizes from config.json that rules for names need, and the names of experts in each model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.models.architectures import find_default_head_width

LAYER = "model.layers.{layer}."


class ExpertNames(NamedTuple):
    """The modules of a mixture of experts on the Hub, below a layer."""

    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    router: str = "mlp.gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"


_MIXTRAL = ExpertNames(
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
    router="block_sparse_moe.gate",
    bias="block_sparse_moe.e_score_correction_bias",
)
_EXPERTS = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "qwen2_moe": ExpertNames(shared="mlp.shared_expert"),
    "qwen3_next": ExpertNames(shared="mlp.shared_expert"),
}


def expert_names_of_type(model_type: str) -> ExpertNames:
    """Return the names of experts for a model type; the common names for a type that is not listed."""
    return _EXPERTS.get(model_type, ExpertNames())


# the keys of config.json for each symbol in rules, in order of precedence
_KEYS = {
    "heads": ("num_attention_heads", "n_head"),
    "key_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "hidden": ("hidden_size", "n_embd"),
    "vocabulary": ("vocab_size",),
    "layers": ("num_hidden_layers", "n_layer"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "intermediate": ("intermediate_size",),
    "expert_intermediate": ("moe_intermediate_size", "intermediate_size"),
    "shared_intermediate": ("shared_expert_intermediate_size", "moe_intermediate_size"),
    "mamba_heads": ("mamba_num_heads",),
    "mamba_width": ("mamba_head_dim",),
    "mamba_groups": ("n_groups",),
    "mamba_states": ("ssm_state_size",),
}
SYMBOLS = tuple(_KEYS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers in the config of a model, or of its text model if it is multimodal.

    `ask_base` returns the names of the base's tensors, None if there is no base.
    """

    config: Mapping[str, Any]
    ask_base: Callable[[], frozenset[str] | None] | None = None

    @property
    def model_type(self) -> str:
        """Return the model type; "" if the config does not name it."""
        return str(self.text_config.get("model_type") or self.config.get("model_type") or "")

    def require_type(self, family: str, known: Sequence[str]) -> str:
        """Return the model type. Raises `Unsupported` if it is not among the types that a family's table knows."""
        if self.model_type not in known:
            message = f"ckptkit does not know {family}'s names for a model of type `{self.model_type}`"
            raise Unsupported(message, hint=f"pass a table of your own with --map; ckptkit knows {', '.join(known)}")
        return self.model_type

    @property
    def text_config(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return inner if isinstance(inner, Mapping) else self.config

    def find_size(self, symbol: str) -> int | None:
        """Return the number that a symbol stands for; None if the config does not have it."""
        values = (self.text_config.get(key) for key in _KEYS[symbol])
        return next((value for value in values if type(value) is int and value > 0), None)

    def __getitem__(self, symbol: str) -> int:
        """Return the number that a symbol stands for. Raises `Mismatch` if the config does not have it."""
        number = self.find_size(symbol)
        if number is not None:
            return number
        raise Mismatch(f"config.json does not have `{_KEYS[symbol][0]}`, which translating the names needs")

    @property
    def head_width(self) -> int:
        """Return the width of one head. Raises `Mismatch` if the config does not determine it."""
        width = self.text_config.get("head_dim") or find_default_head_width(self.model_type)
        if type(width) is int and width > 0:
            return width
        hidden, heads = self["hidden"], self["heads"]
        if hidden % heads:
            raise Mismatch(f"expected heads that divide the hidden size {hidden} (config.json), found {heads}")
        return hidden // heads
