"""Compute names and shapes of the tensors of the model types that ckptkit knows, from config.json alone.

Most types are Llama with another norm, bias or fused projection. Two types have a mixture of experts, with other
tensors in memory than on disk. Names, shapes and order are equal to those in transformers' classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CAUSAL = "ForCausalLM"  # suffix of class names with this head
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")

# in the order of the classes' constructors; weights come before biases
_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

# ten times more than any model has; limits the work for a malicious config
_MAX_LAYERS, _MAX_EXPERTS = 10_000, 1 << 17

# symbolic shapes: hidden, intermediate, vocabulary; query and key width; d, the width of one head
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
_BIASES = {"attention_bias": _ATTENTION_BIAS, "mlp_bias": _MLP_BIAS}


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a model type.

    `memory` are the parameters of a layer's mixture in memory, with symbolic shapes: e is the number of experts, m the
    width of an expert, n twice that width. `disk` are the parameters on disk, each with its shape and the name in
    memory that it comes from; `{}` is the number of an expert.
    """

    memory: Mapping[str, str]
    disk: Mapping[str, tuple[str, str]]
    router: str  # its name on disk
    width: str  # the key of config.json for the width of an expert
    may_be_dense: bool  # `mlp_only_layers` and `decoder_sparse_step` decide which layers are dense


@dataclass(frozen=True, slots=True)
class Variation:
    """The differences of a model type from Llama."""

    more: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # switches of the config that add biases
    head_dim: int | None = None  # default; None: hidden size / heads
    is_tied: bool = False  # default
    mixture: Mixture | None = None


_GATE_UP, _DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
_BOTH, _ATTENTION = ("attention_bias", "mlp_bias"), ("attention_bias",)
_TYPES = {
    "llama": Variation(options=_BOTH),
    "granite": Variation(options=_BOTH),
    "smollm3": Variation(options=_BOTH, is_tied=True),
    "mistral": Variation(),
    "qwen2": Variation(_QKV_BIAS),
    "qwen3": Variation(_HEAD_NORMS, options=_ATTENTION, head_dim=128),
    "gemma": Variation(options=_ATTENTION, head_dim=256, is_tied=True),
    "gemma2": Variation(_FEEDFORWARD_NORMS, options=_ATTENTION, head_dim=256, is_tied=True),
    "gemma3_text": Variation({**_HEAD_NORMS, **_FEEDFORWARD_NORMS}, options=_ATTENTION, head_dim=256, is_tied=True),
    "olmo2": Variation(
        {"self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k", "post_feedforward_layernorm.weight": "h"},
        without=("input_layernorm.weight",),
        options=_ATTENTION,
    ),
    "phi3": Variation(
        {"self_attn.qkv_proj.weight": "ph", "mlp.gate_up_proj.weight": "jh"},
        without=tuple(
            f"{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
        ),
    ),
    "mixtral": Variation(
        mixture=Mixture(
            memory={ROUTER: "eh", _GATE_UP: "enh", _DOWN: "ehm"},
            disk={
                "block_sparse_moe.gate.weight": ("eh", ROUTER),
                "block_sparse_moe.experts.{}.w1.weight": ("mh", _GATE_UP),
                "block_sparse_moe.experts.{}.w2.weight": ("hm", _DOWN),
                "block_sparse_moe.experts.{}.w3.weight": ("mh", _GATE_UP),
            },
            router="block_sparse_moe.gate.weight",
            width="intermediate_size",
            may_be_dense=False,
        )
    ),
    "qwen3_moe": Variation(
        _HEAD_NORMS,
        options=_ATTENTION,
        mixture=Mixture(
            memory={_GATE_UP: "enh", _DOWN: "ehm", ROUTER: "eh"},
            disk={
                "mlp.experts.{}.gate_proj.weight": ("mh", _GATE_UP),
                "mlp.experts.{}.up_proj.weight": ("mh", _GATE_UP),
                "mlp.experts.{}.down_proj.weight": ("hm", _DOWN),
                ROUTER: ("eh", ROUTER),
            },
            router=ROUTER,
            width="moe_intermediate_size",
            may_be_dense=True,
        ),
    ),
}
# numbers that the config of a mixture must contain; otherwise its class has a default that this table does not know
_SIZES_OF_EXPERTS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    *("vocab_size", "num_experts_per_tok", "max_position_embeddings"),
)


@dataclass(frozen=True, eq=False)
class Table:
    """The tensors of a model of a known type: shapes by name, in memory in the order of its `parameters()`.

    `blocks` are the tensors of each layer in memory, and `sizes` the values of the letters in their shapes.
    """

    blocks: tuple[Mapping[str, str], ...]
    sizes: Mapping[str, int]
    is_tied: bool
    mixture: Mixture | None

    @cached_property
    def memory(self) -> dict[str, Shape]:
        """Return the shapes of all tensors in memory, including the head if it is tied to the embedding."""
        names = {EMBEDDING: "vh"}
        for i, block in enumerate(self.blocks):
            names |= {f"model.layers.{i}.{name}": letters for name, letters in block.items()}
        names |= {"model.norm.weight": "h", HEAD: "vh"}
        return {name: self.shape_of_letters(letters) for name, letters in names.items()}

    @cached_property
    def disk(self) -> dict[str, tuple[Shape, str]]:
        """Return the shape of each tensor on disk, and the name in memory that it comes from."""
        on_disk: dict[str, tuple[Shape, str]] = {}
        for name, shape in self.memory.items():
            layer, _, own = name.partition(".layers.")[2].partition(".")
            parts = self.mixture.disk.items() if self.mixture else ()
            shapes = {part: self.shape_of_letters(letters) for part, (letters, origin) in parts if origin == own}
            for i in range(self.sizes["e"] if shapes else 0):
                on_disk |= {f"model.layers.{layer}.{part.format(i)}": (shapes[part], name) for part in shapes}
            if not shapes:
                on_disk[name] = shape, name
        return on_disk

    def shape_of_letters(self, letters: str) -> Shape:
        return tuple(self.sizes[letter] for letter in letters)


def find_table(config: Mapping[str, Any]) -> Table | None:
    """Return the tensors of the model that a config.json describes; None if the table does not have this type.

    Returns None for a class with another head, because it has other tensors, and for a mixture whose config lacks a
    size, because its class has a default. Raises `Unsupported` for a dense model whose config lacks a size.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and not str(named[0]).endswith(_CAUSAL):
        return None
    model_type = str(config.get("model_type"))
    variation = _TYPES.get(model_type)
    if variation is None:
        return None
    if variation.mixture is not None:
        return find_mixture_table(config, variation, variation.mixture)
    try:
        sizes, layers = sizes_by_letter(config), int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ArithmeticError):
        layers = _MAX_LAYERS + 1
    if layers > _MAX_LAYERS:
        raise Unsupported(f"the config of this `{model_type}` lacks a size, or gives a size that is not a number")
    block = symbolic_block_shapes(variation, config)
    return Table((block,) * layers, sizes, has_tied_head(config), None)


def find_mixture_table(config: Mapping[str, Any], variation: Variation, mixture: Mixture) -> Table | None:
    """Return the tensors of a model with experts; None if its config lacks a size, or the model is quantized."""
    counts = [config[key] for key in ("num_experts", "num_local_experts") if key in config]
    heads = [config["head_dim"]] if config.get("head_dim") is not None else []
    every = config.get("decoder_sparse_step", 0) if mixture.may_be_dense else 1
    dense = (config.get("mlp_only_layers") or []) if mixture.may_be_dense else []
    numbers = [*counts, *heads, every, *(config.get(key) for key in (*_SIZES_OF_EXPERTS, mixture.width))]
    are_numbers = all(type(one) is int and one > 0 for one in numbers)
    if not are_numbers or len(set(counts)) != 1 or not isinstance(dense, list) or config.get("quantization_config"):
        return None
    experts, layers, width = counts[0], config["num_hidden_layers"], config[mixture.width]
    if layers > _MAX_LAYERS or layers * experts > _MAX_EXPERTS:
        return None
    block = symbolic_block_shapes(variation, config)
    # a block whose feed-forward half is the mixture
    first = {name: letters for name, letters in block.items() if name.startswith("self_attn.")}
    last = {name: letters for name, letters in block.items() if not name.startswith(("self_attn.", "mlp."))}
    sparse = {**first, **mixture.memory, **last}
    blocks = (block if i in dense or (i + 1) % every else sparse for i in range(layers))
    sizes = sizes_by_letter(config) | {"e": experts, "m": width, "n": 2 * width}
    return Table(tuple(blocks), sizes, has_tied_head(config), mixture)


def symbolic_block_shapes(variation: Variation, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the symbolic shapes of a dense block, in the order of the model's parameters."""
    block = {name: letters for name, letters in {**_BLOCK, **variation.more}.items() if name not in variation.without}
    for option in variation.options:
        if config.get(option):
            block |= _BIASES[option]

    def place(name: str) -> tuple[int, bool]:
        *_, module, kind = name.split(".")
        return _MODULES.index(module), kind == "bias"

    return {name: block[name] for name in sorted(block, key=place)}


def sizes_by_letter(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that the letters in symbolic shapes stand for.

    Raises KeyError, TypeError or ValueError if one is missing, and ArithmeticError for zero heads or an infinite size.
    """
    hidden, heads, inner = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    key_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or find_default_head_width(str(config.get("model_type"))) or hidden // heads)
    query, key = heads * head, key_heads * head
    fused = {"j": 2 * inner, "p": query + 2 * key}  # the projections of gate and up, and of queries, keys and values
    return {"h": hidden, "i": inner, "v": int(config["vocab_size"]), "q": query, "k": key, "d": head, **fused}


def find_default_head_width(model_type: str) -> int | None:
    """Return the default head width of a type; None if it follows from the hidden size, or the type is unknown."""
    return _TYPES.get(model_type, Variation()).head_dim


def has_tied_head(config: Mapping[str, Any]) -> bool:
    variation = _TYPES.get(str(config.get("model_type")), Variation())
    return bool(config.get("tie_word_embeddings", variation.is_tied))


def find_embedding(names: Iterable[str]) -> str | None:
    """Return the name of the input embedding that a head would be tied to; None unless there is exactly one."""
    embeddings = [name for name in names if name.endswith(_EMBEDDINGS)]
    return embeddings[0] if len(embeddings) == 1 else None
