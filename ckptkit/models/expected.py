"""Compute the tensors, with their shapes, that a config.json calls for. Arithmetic on the config; no model code.

The families here are Llama's and those that vary it by a norm, a bias or a fused projection; names and shapes are those
of transformers' own classes, which the tests compare with. Of other models ckptkit knows what the base's weights show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.tensors.box import Shape

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CAUSAL = "ForCausalLM"  # how the names of classes end that have such a head
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")

# in the order in which the classes make them; weights come before biases
_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

_MOST_LAYERS = 10_000  # ten times those of any model; a config may be anybody's

# shapes in letters: hidden, intermediate, vocabulary, query and key width, width of one head
_BLOCK = {
    "self_attn.q_proj.weight": "qh",
    "self_attn.k_proj.weight": "kh",
    "self_attn.v_proj.weight": "kh",
    "self_attn.o_proj.weight": "hq",
    "mlp.gate_proj.weight": "ih",
    "mlp.up_proj.weight": "ih",
    "mlp.down_proj.weight": "hi",
    "input_layernorm.weight": "h",
    "post_attention_layernorm.weight": "h",
}
_QKV_BIAS = {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "k", "self_attn.v_proj.bias": "k"}
_ATTENTION_BIAS = {**_QKV_BIAS, "self_attn.o_proj.bias": "h"}
_MLP_BIAS = {"mlp.gate_proj.bias": "i", "mlp.up_proj.bias": "i", "mlp.down_proj.bias": "h"}
_HEAD_NORMS = {"self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"}
_FEEDFORWARD_NORMS = {"pre_feedforward_layernorm.weight": "h", "post_feedforward_layernorm.weight": "h"}


@dataclass(frozen=True, slots=True)
class Family:
    """The ways in which a model type differs from Llama."""

    more: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # switches of the config that add biases
    head_dim: int | None = None  # where the config gives none: None for hidden size over heads
    is_tied: bool = False  # where the config says nothing


_BIASES = {"attention_bias": _ATTENTION_BIAS, "mlp_bias": _MLP_BIAS}
_BOTH, _ATTENTION = ("attention_bias", "mlp_bias"), ("attention_bias",)
_FAMILIES = {
    "llama": Family(options=_BOTH),
    "granite": Family(options=_BOTH),
    "smollm3": Family(options=_BOTH, is_tied=True),
    "mistral": Family(),
    "qwen2": Family(_QKV_BIAS),
    "qwen3": Family(_HEAD_NORMS, options=_ATTENTION, head_dim=128),
    "gemma": Family(options=_ATTENTION, head_dim=256, is_tied=True),
    "gemma2": Family(_FEEDFORWARD_NORMS, options=_ATTENTION, head_dim=256, is_tied=True),
    "gemma3_text": Family({**_HEAD_NORMS, **_FEEDFORWARD_NORMS}, options=_ATTENTION, head_dim=256, is_tied=True),
    "olmo2": Family(
        {"self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k", "post_feedforward_layernorm.weight": "h"},
        without=("input_layernorm.weight",),
        options=_ATTENTION,
    ),
    "phi3": Family(
        {"self_attn.qkv_proj.weight": "ph", "mlp.gate_up_proj.weight": "jh"},
        without=tuple(
            f"{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
        ),
    ),
}


def expected_shapes(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Return the shape by name of every tensor of the model that `config` describes; None for an unknown model type.

    They are in the order of the model's own `state_dict()` and `parameters()`.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    try:
        sizes = letter_sizes(config)
        layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    if layers > _MOST_LAYERS:
        return None
    block = {name: letters for name, letters in {**_BLOCK, **family.more}.items() if name not in family.without}
    for option in family.options:
        if config.get(option):
            block |= _BIASES[option]
    ordered = sorted(block.items(), key=lambda item: place_in_block(item[0]))
    names = {EMBEDDING: "vh"}
    names |= {f"model.layers.{i}.{name}": letters for i in range(layers) for name, letters in ordered}
    names |= {"model.norm.weight": "h", HEAD: "vh"}
    return {name: tuple(sizes[letter] for letter in letters) for name, letters in names.items()}


def place_in_block(name: str) -> tuple[int, bool]:
    """Return what the parameters of a block are sorted by, to be in the order in which the model has them."""
    *_, module, kind = name.split(".")
    return _MODULES.index(module), kind == "bias"


def letter_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers that the letters of the shapes stand for.

    Raises KeyError, TypeError or ValueError without them, and ArithmeticError for heads that are none, or a size that
    is infinite.
    """
    family = _FAMILIES.get(str(config.get("model_type")), Family())
    hidden, heads, inner = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    key_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or family.head_dim or hidden // heads)
    query, key = heads * head, key_heads * head
    return {
        "h": hidden,
        "i": inner,
        "j": 2 * inner,
        "v": int(config["vocab_size"]),
        "q": query,
        "k": key,
        "p": query + 2 * key,
        "d": head,
    }


def default_head_width(model_type: str) -> int | None:
    """Return the width of a head where a config gives none; None if it follows from the hidden size, or is unknown."""
    return _FAMILIES.get(model_type, Family()).head_dim


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether the model is one whose tensors are known here: of a type in the table, with a head for tokens.

    A model with a head of another kind, or none, has other tensors.
    """
    named = config.get("architectures")
    is_causal = not isinstance(named, list) or not named or str(named[0]).endswith(_CAUSAL)
    return is_causal and str(config.get("model_type")) in _FAMILIES


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the model's head is its embedding."""
    family = _FAMILIES.get(str(config.get("model_type")), Family())
    return bool(config.get("tie_word_embeddings", family.is_tied))


def find_embedding(names: Iterable[str]) -> str | None:
    """Return the name of the input embedding that a head would be tied to, if it is plain which."""
    found = [name for name in names if name.endswith(_EMBEDDINGS)]
    return found[0] if len(found) == 1 else None
