"""Model configuration: the shape of the built-in Llama, by size name or config.json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import NotACheckpoint, Unsupported, Usage, translate_os_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama, by the names of Hugging Face's config.json. The defaults are the size `tiny`."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 176
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            require_at_least(1, name, getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise Usage(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise Usage(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise Usage(f"head_dim {self.head_dim} is odd", hint="RoPE turns pairs of channels: use an even head_dim")

    @classmethod
    def sized(cls, size: str, *, tied: bool = True) -> ModelConfig:
        """The model of a size name (`tiny`, `3m`, `60m`, `1b`: parameters, counted with the byte vocabulary)."""
        if size not in SIZES:
            raise Usage(f"there is no model size `{size}`", hint=f"use one of {', '.join(SIZES)}, or a config.json")
        return cls(**SIZES[size], tie_word_embeddings=tied)

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """The model that a config.json describes; raises `Unsupported` for what is not a plain Llama."""
        try:
            with translate_os_errors(path):
                keys = json.loads(path.read_text())
            return cls._from_keys(keys, path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotACheckpoint(f"not the config.json of a model: {error!r}", path=path) from error

    @classmethod
    def _from_keys(cls, keys: Mapping[str, Any], path: Path) -> ModelConfig:
        for name, value in PLAIN_LLAMA.items():
            if keys.get(name, value) != value:
                raise Unsupported(f"`{name}` is {keys[name]!r}; the built-in Llama has {value!r}", path=path)
        rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise Unsupported(f"RoPE of type `{kind}`; the built-in Llama has `default`", path=path)
        heads = int(keys["num_attention_heads"])
        return cls(
            vocab_size=int(keys["vocab_size"]),
            hidden_size=int(keys["hidden_size"]),
            intermediate_size=int(keys["intermediate_size"]),
            num_hidden_layers=int(keys["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(keys.get("num_key_value_heads") or heads),
            head_dim=int(keys.get("head_dim") or keys["hidden_size"] // heads),
            max_position_embeddings=int(keys.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", keys.get("rope_theta", 10000.0))),
            initializer_range=float(keys.get("initializer_range", 0.02)),
            tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
        )

    def to_json(self) -> str:
        """The text of the config.json with which transformers opens this model as `LlamaForCausalLM`."""
        keys: dict[str, Any] = {
            **PLAIN_LLAMA,
            "architectures": ["LlamaForCausalLM"],
            "dtype": "float32",
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": END_OF_TEXT,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
        }
        for name in self.__slots__:
            if name != "rope_theta":
                keys[name] = getattr(self, name)
        return json.dumps(keys, indent=2, sort_keys=True) + "\n"


def require_at_least(least: int, name: str, value: float) -> None:
    """Raise `Usage` unless `value` is a number of at least `least` (NaN is not)."""
    if not value >= least:
        raise Usage(f"{name} is {value}; it must be {least} or more")


BYTES = 256
END_OF_TEXT = 0  # the NUL byte: no text contains it
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "3m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "head_dim": 64},
    "60m": {
        "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 13, "head_dim": 64,
        "num_attention_heads": 10, "num_key_value_heads": 5,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
}  # fmt: skip
PLAIN_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
