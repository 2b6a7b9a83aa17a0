"""The sizes from config.json that the rules between names need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.models.known_types import default_head_width

# by the symbol that rules use: the keys of config.json that give it, in order of precedence
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
    """The numbers in the config of a model, or of its text model if it has others.

    `ask_base` gives the names of the tensors that a training began with, None if it had none.
    """

    config: Mapping[str, Any]
    ask_base: Callable[[], frozenset[str] | None] | None = None

    @property
    def model_type(self) -> str:
        """Return the type of the model, "" where the config says none."""
        return str(self.text.get("model_type") or self.config.get("model_type") or "")

    def require_type(self, family: str, known: Sequence[str]) -> str:
        """Return the type of the model. Raises `Unsupported` if it is not among those that a family's table knows."""
        if self.model_type not in known:
            message = f"ckptkit does not know {family}'s names for a model of type `{self.model_type}`"
            raise Unsupported(message, hint=f"pass a table of your own with --map; ckptkit knows {', '.join(known)}")
        return self.model_type

    @property
    def text(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return inner if isinstance(inner, Mapping) else self.config

    def find(self, symbol: str) -> int | None:
        """Return the number that a symbol stands for, None if the config does not say it."""
        values = (self.text.get(key) for key in _KEYS[symbol])
        return next((value for value in values if type(value) is int and value > 0), None)

    def __getitem__(self, symbol: str) -> int:
        """Return the number that a symbol stands for. Raises `Mismatch` if the config does not say it."""
        found = self.find(symbol)
        if found is not None:
            return found
        raise Mismatch(f"config.json does not have `{_KEYS[symbol][0]}`, which translating the names needs")

    @property
    def head_width(self) -> int:
        """Return the width of one head. Raises `Mismatch` if the config does not say it."""
        width = self.text.get("head_dim") or default_head_width(self.model_type)
        if type(width) is int and width > 0:
            return width
        hidden, heads = self["hidden"], self["heads"]
        if hidden % heads:
            raise Mismatch(f"expected heads that divide the hidden size {hidden} (config.json), found {heads}")
        return hidden // heads
