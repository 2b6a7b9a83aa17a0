"""The shape of the built-in Llama, from a size name or config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, NotACheckpoint, Unsupported, Usage, too_small_error, translate_os_errors
from ckptkit.io.path import means_hub_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling for a longer context. All fields but `factor` apply only to the type `llama3`."""

    rope_type: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        require_at_least(1, "factor", self.factor)
        require_at_least(1, "original_max_position_embeddings", self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise Usage(
                f"low_freq_factor: expected 0 to {self.high_freq_factor} (high_freq_factor), found "
                f"{self.low_freq_factor}"
            )

    @classmethod
    def from_rope_config(cls, rope: Mapping[str, Any]) -> RopeScaling | None:
        """Return the scaling in the RoPE keys of a config.json, None for plain RoPE. Raises `Unsupported`."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind == "linear":
            return cls(rope_type=kind, factor=float(rope["factor"]))
        if kind == "llama3":
            return cls(
                rope_type=kind,
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
            )
        raise Unsupported(
            f"RoPE: expected type `default`, `linear` or `llama3`, which the built-in Llama has, found `{kind}`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama, with the names of Hugging Face's config.json. The defaults are the size `tiny`."""

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
    rope_scaling: RopeScaling | None = None
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
                f"hidden_size: expected a multiple of {self.num_attention_heads} "
                f"(num_attention_heads), found {self.hidden_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise Usage(
                f"num_attention_heads: expected a multiple of {self.num_key_value_heads} (num_key_value_heads), "
                f"found {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise Usage(f"head_dim: expected an even number for RoPE, found {self.head_dim}")

    @classmethod
    def of_size(cls, size: str, *, tied: bool = True, vocab_size: int | None = None) -> ModelConfig:
        """Return the model of a size name; `vocab_size` is 256 by default, for bytes. Raises `Usage`.

        `1b` to `70b` have the shapes of Llama 3. The parameter counts in their names hold only with its vocabulary of
        128256 tokens.
        """
        if size not in SIZES:
            raise Usage(f"unknown model size `{size}`", hint=f"use one of {', '.join(SIZES)}, or a config.json")
        return cls(**SIZES[size], vocab_size=BYTES if vocab_size is None else vocab_size, tie_word_embeddings=tied)

    @classmethod
    def from_config_json(cls, path: Path) -> ModelConfig:
        """Return the model of a config.json. Raises `Unsupported` unless it is a plain Llama, and `NotACheckpoint`."""
        try:
            with translate_os_errors(path):
                keys = json.loads(path.read_text())
            for name, value in PLAIN_LLAMA.items():
                if keys.get(name, value) != value:
                    expected = f"expected {value!r}, which the built-in Llama has"
                    raise Unsupported(f"`{name}`: {expected}, found {keys[name]!r}", path=path)
            rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
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
                rope_scaling=RopeScaling.from_rope_config(rope),
                initializer_range=float(keys.get("initializer_range", 0.02)),
                tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
            )
        except CkptError as error:
            error.blame(path=path)
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotACheckpoint(f"not the config.json of a model: {error!r}", path=path) from error

    def to_json(self) -> str:
        """Return the text of a config.json with which transformers loads this model as `LlamaForCausalLM`."""
        keys: dict[str, Any] = {
            **PLAIN_LLAMA,
            "architectures": ["LlamaForCausalLM"],
            "dtype": "float32",
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": END_OF_TEXT,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
        }
        if self.rope_scaling is not None:
            scaling = asdict(self.rope_scaling)
            names = scaling if self.rope_scaling.rope_type == "llama3" else ("rope_type", "factor")
            keys["rope_parameters"] |= {name: scaling[name] for name in names}
        for name in self.__slots__:
            if name not in {"rope_theta", "rope_scaling"}:
                keys[name] = getattr(self, name)
        return json.dumps(keys, indent=2, sort_keys=True) + "\n"


def require_at_least(least: int, name: str, value: float) -> None:
    """Raise `Usage` unless `value` is at least `least`; NaN raises too."""
    if not value >= least:
        raise too_small_error(name, least, value)


BYTES = 256
END_OF_TEXT = 0  # the NUL byte: no text contains it
LLAMA_3: dict[str, Any] = {
    "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "3m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "head_dim": 64},
    "60m": {
        "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 13, "head_dim": 64,
        "num_attention_heads": 10, "num_key_value_heads": 5,
    },
    "1b": LLAMA_3 | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64,
    },
    "3b": LLAMA_3 | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    },
    "8b": LLAMA_3 | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "70b": LLAMA_3 | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
PLAIN_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}


def require_known_model(model: str) -> None:
    """Raise `Usage` unless `model` is a size, exists as a path, or looks like a Hub id."""
    if model not in SIZES and not Path(model).exists() and not means_hub_model(model):
        hint = f"use one of {', '.join(SIZES)}, a config.json, a model's directory or a Hub id like `org/model`"
        raise Usage(f"unknown model `{model}`", hint=hint)
