"""Translate the names of Meta's Llama releases, which Mistral also uses, to the Hub's names.

Source: meta-llama/llama-models, models/llama3/model.py; mistralai/mistral-inference, transformer.py; and for the order
of rows transformers/models/{llama,mistral,mixtral}/convert_*_weights_to_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import LAYER, Sizes, expert_names_of_type
from ckptkit.models.names.steps import Rotary

_TYPES = ("llama", "mistral", "mixtral")
_OWN = "layers.{layer}."
_SIZES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
}
_OF_MIXTURE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_WITHOUT_LAYER = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type(META.name, _TYPES)
    experts = expert_names_of_type("mixtral")
    mixture = {
        "feed_forward.gate": experts.router,
        "feed_forward.experts.{expert}.w1": experts.gate,
        "feed_forward.experts.{expert}.w3": experts.up,
        "feed_forward.experts.{expert}.w2": experts.down,
    }
    in_layer = _IN_LAYER | (mixture if model == "mixtral" else {})
    return (
        *(Rule.of(f"{own}.weight", f"{hub}.weight") for own, hub in _WITHOUT_LAYER.items()),
        *(Rule.of(f"{_OWN}{own}.weight", f"{LAYER}{hub}.weight") for own, hub in in_layer.items()),
        Rule.of(f"{_OWN}attention.wq.weight", f"{LAYER}self_attn.q_proj.weight", Rotary("heads")),
        Rule.of(f"{_OWN}attention.wk.weight", f"{LAYER}self_attn.k_proj.weight", Rotary("key_heads")),
    )


def config_from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of params.json, in keys of config.json where it has them.

    Source of `use_scaled_rope`: `apply_scaling` in llama-models, models/llama3/model.py, which uses the factors of
    Llama 3.1.
    """
    config = {_SIZES.get(own, own): value for own, value in params.items() if own not in ("moe", "use_scaled_rope")}
    moe = params.get("moe")
    if isinstance(moe, Mapping):
        config |= {hub: moe[own] for own, hub in _OF_MIXTURE.items() if own in moe}
    if type(params.get("use_scaled_rope")) is bool:
        config["rope_parameters"] = {"rope_type": "llama3" if params["use_scaled_rope"] else "default"}
    return {"model_type": "mixtral" if "moe" in params else "llama", **config}


META = Family(
    name="meta",
    types=_TYPES,
    drops=(r"rope\.freqs",),
    rules=rules,
    trainer="Meta, or in its format",
    sizes_file="params.json",
    config_of=config_from_params,
)
