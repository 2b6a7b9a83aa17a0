"""Make a model of each type that transformers has, as small as its config allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import product
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

HEADS = (
    *("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"),
    *("AutoModel", "AutoModelForCTC", "AutoModelForTextToWaveform", "AutoModelForMaskGeneration"),
)
LAYERS = 4  # a multiple of most patterns in which layers alternate
# what a number of a config is made, by its name
COUNTS = {
    r"(num_|n_|.*_)?(hidden_)?layers?|.*num_.*_layers|depth|n_layer|.*_depth": LAYERS,
    r"(num|n)_(local_|routed_)?experts|num_.*_experts|moe_num_experts": 4,
    r".*per_tok|moe_(k|topk|top_k)|top_k|(n|num_expert)_groups?|topk_group|.*topk_groups?": 1,
    r".*vocab_size|vocab_size_per_layer_input|n_words": 320,
}
WIDTHS = {
    r"(?!.*ffn).*hidden_size|d_model|n_embd|(embed_|emb_)?dim|projection_dim|hidden_dim": 64,
    r".*intermediate_size|d_ff|.*ffn_dim|.*mlp_dim|.*ffn_hidden_size|n_inner": 96,
    r"(num_|n_|(encoder|decoder)_)?(attention_|num_attention_)?heads?|n_head": 4,
    r"num_(key_value|kv)_heads|n_kv_heads": 2,
    r"head_dim|d_kv": 16,
}
FEWER = {pattern: size for pattern, size in COUNTS.items() if size != LAYERS}  # for configs that name their layers
EVEN = {r".*_heads": 4, **{pattern: size for pattern, size in WIDTHS.items() if "head_dim" not in pattern}}
LADDER: tuple[Mapping[str, int], ...] = (
    *({**COUNTS, **WIDTHS}, {**FEWER, **WIDTHS}, {**COUNTS, **EVEN}, {**FEWER, **EVEN}),
    *(COUNTS, FEWER, {}),
)
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# what a type's config lacks by itself, without which transformers builds no model
LACKING: dict[str, dict[str, Any]] = {
    **{name: {"prediction_length": 4} for name in ("autoformer", "informer", "time_series_transformer")},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral")},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_hidden_layers": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 5}, "vq_config": {"base_channels": 32}},
    "emu3_vqgan": {"base_channels": 32},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
}
# tokens that a smaller vocabulary has to have
_TOKEN = re.compile(r".*token_(id|index)")


class NoClass(ValueError):
    """A type that transformers has no class of models for: a part of others."""


class TooLarge(ValueError):
    """A model that no attempt makes small."""


def make_small(model_type: str, most: int) -> PreTrainedModel:
    """Return a model with random weights and at most `most` elements, by the first attempt that transformers accepts.

    Raises what the first attempt raised; `NoClass` if transformers has no class of the type.
    """
    failures = []
    for cls, sizes in product(classes_of(CONFIG_MAPPING[model_type]), LADDER):
        try:
            config = shrunk(CONFIG_MAPPING[model_type], sizes)
            require_small(cls, config, most)
            return filled(cls(config))
        except Exception as error:  # noqa: BLE001 - transformers' own model code may raise anything
            failures.append(error)
    raise failures[0]


def classes_of(config: type[PreTrainedConfig]) -> list[Callable[..., PreTrainedModel]]:
    """Return the classes of models of a config: those with heads first, or else the last of its module."""
    mappings = [getattr(transformers, name)._model_mapping for name in HEADS]
    if found := [mapping[config] for mapping in mappings if config in mapping]:
        return found
    module = import_module(config.__module__.replace(".configuration_", ".modeling_"))
    own = [one for one in vars(module).values() if getattr(one, "config_class", None) is config]
    if not own:
        raise NoClass(f"no class of {module.__name__} has it")
    return own[-1:]


def shrunk(cls: type[PreTrainedConfig], sizes: Mapping[str, int]) -> PreTrainedConfig:
    """Return a config of a class with smaller numbers where it has them, also in the configs within it."""
    lacking = LACKING.get(cls.model_type, {})
    return cls(**{**dict(smaller(cls(**lacking), sizes)), **lacking})


def smaller(config: PreTrainedConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a config that differ from its own, and every config within it as a whole."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers = {value for name, value in values.items() if isinstance(value, int) and wanted(name, sizes) == LAYERS}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            yield name, {**value.to_dict(), **dict(smaller(value, sizes))}
        elif isinstance(value, list) and len(value) > LAYERS and len(value) in layers:
            yield name, value[:LAYERS]
        elif isinstance(value, int) and not isinstance(value, bool):
            new = 0 if sizes and _TOKEN.fullmatch(name) and value > 0 else wanted(name, sizes)
            if new is not None and new < value:
                yield name, new


def wanted(name: str, sizes: Mapping[str, int]) -> int | None:
    """Return what a number of this name is made."""
    return next((size for pattern, size in sizes.items() if re.fullmatch(pattern, name)), None)


def require_small(cls: Callable[..., PreTrainedModel], config: PreTrainedConfig, most: int) -> None:
    """Raise `TooLarge` for a model with more than `most` elements; it takes no memory."""
    with torch.device("meta"):
        found = sum(tensor.numel() for tensor in cls(config).state_dict().values())
    if found > most:
        raise TooLarge(f"{found:,} elements")


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model in which no two tensors are the same by chance: norms are no longer all ones."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                nn.init.normal_(tensor)
    return model
