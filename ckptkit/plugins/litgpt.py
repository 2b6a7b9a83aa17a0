"""Translate the tensor names of LitGPT to the Hub's names.

Source: litgpt/scripts/convert_lit_checkpoint.py, `copy_weights_*`. Queries, keys and values are concatenated in one
matrix, `attn.qkv`. Before version 0.5 the matrix was `attn.attn`, interleaved by groups (litgpt/model.py,
`qkv_reassemble`), as in GPT-NeoX on the Hub.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ckptkit.io.file import is_existing_path, read_small
from ckptkit.layout import Layout
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule, weight_and_bias_rules
from ckptkit.models.names.sizes import LAYER, Sizes, expert_names_of_type
from ckptkit.models.names.steps import Chain, Concatenated, Grouped, Reversed, TensorStep

_OWN = "transformer.h.{layer}."
_APART = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2")
_MIXTURES = ("mixtral", "qwen3_moe")
_FUSED, _NEOX = "phi3", "gpt_neox"
_TYPES = (*_APART, *_MIXTURES, _FUSED, _NEOX)
_FOUR_NORMS = ("gemma2", "gemma3_text")

_CONFIG = "model_config.yaml"
_CONFIG_LIMIT = 1 << 20  # bytes; LitGPT writes about a kilobyte
_NOT_COMPUTED = ("name", "block_size", "padding_multiple", "padded_vocab_size")
_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_query_groups": "num_key_value_heads",
    "head_size": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
    "rotary_percentage": "partial_rotary_factor",
    "sliding_window_size": "sliding_window",
    "attention_logit_softcapping": "attn_logit_softcapping",
    "attention_scores_scalar": "query_pre_attn_scalar",
    "parallel_residual": "use_parallel_residual",
    "n_expert": "num_local_experts",
    "n_expert_per_token": "num_experts_per_tok",
}
_CONSTANTS = {"null": None, "true": True, "false": False}

_QKV = Concatenated(3, extents=("heads", "key_heads", "key_heads"))


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type(LITGPT.name, _TYPES)
    if model == _NEOX:
        return neox_rules()
    modules = {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "lm_head": "lm_head",
        _OWN + "attn.proj": LAYER + "self_attn.o_proj",
        _OWN + "attn.norm_q": LAYER + "self_attn.q_norm",
        _OWN + "attn.norm_k": LAYER + "self_attn.k_norm",
        **hub_norm_names(model),
    }
    if model != _FUSED:
        modules |= feed_forward_names("mlp", LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj", LAYER + "mlp.down_proj")
    if model in _MIXTURES:
        hub = expert_names_of_type(model)
        modules[_OWN + "mlp.gate"] = LAYER + hub.router
        modules |= feed_forward_names("mlp.experts.{expert}", *(LAYER + name for name in (hub.gate, hub.up, hub.down)))
    projections = tuple(f"{LAYER}self_attn.{letter}_proj" for letter in "qkv")
    return (
        *(rule for own_name, hub_name in modules.items() for rule in weight_and_bias_rules(own_name, hub_name)),
        *(rules_for_fused_projections() if model == _FUSED else fused_qkv_rules(projections, _QKV, Grouped())),
    )


def hub_norm_names(model: str) -> dict[str, str]:
    """Return the Hub names of the norms in a layer, keyed by LitGPT name."""
    hub_names = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
    if model in _FOUR_NORMS:
        hub_names = {
            "norm_1": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "norm_2": "pre_feedforward_layernorm",
            "post_mlp_norm": "post_feedforward_layernorm",
        }
    if model == "olmo2":
        hub_names = {"norm_2": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
    return {_OWN + own_name: LAYER + hub_name for own_name, hub_name in hub_names.items()}


def feed_forward_names(own: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the Hub names of three projections, keyed by LitGPT name."""
    return {f"{_OWN}{own}.fc_1": gate, f"{_OWN}{own}.fc_2": up, f"{_OWN}{own}.proj": down}


def fused_qkv_rules(
    hub: str | tuple[str, ...], step: TensorStep | None, older_step: TensorStep | None
) -> tuple[Rule, ...]:
    """Return the rules for the fused query, key and value matrix: the current form, and the form before 0.5."""
    return (
        *weight_and_bias_rules(_OWN + "attn.qkv", hub, step),
        *weight_and_bias_rules(_OWN + "attn.attn", hub, older_step),
    )


def rules_for_fused_projections() -> tuple[Rule, ...]:
    """Return the rules for types that also fuse these tensors on the Hub, as well as the gate and up projections."""
    gate_and_up = tuple(f"{_OWN}mlp.{name}.weight" for name in ("fc_1", "fc_2"))
    return (
        *fused_qkv_rules(LAYER + "self_attn.qkv_proj", None, Chain((Grouped(), Reversed(_QKV)))),
        Rule.of(gate_and_up, LAYER + "mlp.gate_up_proj.weight", Reversed(Concatenated(2))),
        Rule.of(_OWN + "mlp.proj.weight", LAYER + "mlp.down_proj.weight"),
    )


def neox_rules() -> tuple[Rule, ...]:
    """Return the rules for GPT-NeoX, which interleaves queries, keys and values by groups on the Hub."""
    layer = "gpt_neox.layers.{layer}."
    modules = {
        "transformer.wte": "gpt_neox.embed_in",
        "transformer.ln_f": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out | lm_head",
        _OWN + "norm_1": layer + "input_layernorm",
        _OWN + "norm_2": layer + "post_attention_layernorm",
        _OWN + "attn.proj": layer + "attention.dense",
        _OWN + "mlp.fc": layer + "mlp.dense_h_to_4h",
        _OWN + "mlp.proj": layer + "mlp.dense_4h_to_h",
    }
    return (
        *(rule for own_name, hub_name in modules.items() for rule in weight_and_bias_rules(own_name, hub_name)),
        *fused_qkv_rules(layer + "attention.query_key_value", Chain((_QKV, Reversed(Grouped()))), None),
    )


def computation_settings_of(checkpoint: Layout) -> dict[str, Any]:
    """Return the settings in model_config.yaml, in keys of config.json where it has them; {} without the file.

    Reads the settings that are one number or word, which the file has in a line of their own at the top level. Source:
    `save_config` in litgpt/utils.py, and litgpt/config.py.
    """
    path = checkpoint.root / _CONFIG
    if not is_existing_path(path):
        return {}
    lines = re.findall(r"^(\w+): *(\S+) *$", read_small(path, _CONFIG_LIMIT).decode(errors="replace"), re.MULTILINE)
    return {_KEYS.get(key, key): parse_yaml_scalar(text) for key, text in lines if key not in _NOT_COMPUTED}


def parse_yaml_scalar(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


LITGPT = Family(
    name="litgpt",
    types=_TYPES,
    rules=rules,
    describe=computation_settings_of,
    has_tied_head=True,
)
