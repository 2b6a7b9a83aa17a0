"""Translate the names of torchtune to the Hub's names.

Source: torchtune/models/convert_weights.py, and {qwen2,qwen3,gemma2,phi3}/_convert_weights.py. The rows of queries and
keys are interleaved in rotary pairs, except for Qwen and Phi. The norms around Gemma 2's feed-forward layer have the
names that its converter uses.
"""

from __future__ import annotations

from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule, weight_and_bias_rules
from ckptkit.models.names.sizes import LAYER, Sizes
from ckptkit.models.names.steps import Concatenated, Reversed, Rotary

_IN_PAIRS = ("llama", "mistral", "gemma", "gemma2")
_AS_THERE = ("qwen2", "qwen3")
_FUSED = "phi3"
_TYPES = (*_IN_PAIRS, *_AS_THERE, _FUSED)
_OWN = "layers.{layer}."
_NORMS = {"sa_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "sa_norm": "input_layernorm",
    "sa_scale": "post_attention_layernorm",
    "mlp_scale": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type(TORCHTUNE.name, _TYPES)
    norms = _FOUR_NORMS if model == "gemma2" else _NORMS
    names = {_OWN + own: LAYER + hub for own, hub in norms.items()}
    names |= {_OWN + f"attn.{own}_norm": LAYER + f"self_attn.{own}_norm" for own in "qk"}
    names["norm.rms_norm" if model == "gemma2" else "norm"] = "model.norm"
    return (
        Rule.of("tok_embeddings.weight", "model.embed_tokens.weight"),
        Rule.of("output.weight", "lm_head.weight"),
        *(Rule.of(f"{own}.scale", f"{hub}.weight") for own, hub in names.items()),
        *weight_and_bias_rules(_OWN + "attn.output_proj", LAYER + "self_attn.o_proj"),
        Rule.of(_OWN + "mlp.w2.weight", LAYER + "mlp.down_proj.weight"),
        *(fused_projection_rules() if model == _FUSED else separate_projection_rules(is_in_pairs=model in _IN_PAIRS)),
    )


def separate_projection_rules(*, is_in_pairs: bool) -> tuple[Rule, ...]:
    """Return the rules for projections that are separate tensors on the Hub too."""
    heads = {"q": Rotary("heads"), "k": Rotary("key_heads")} if is_in_pairs else {}
    projections = {"w1": "gate_proj", "w3": "up_proj"}
    return (
        *(
            rule
            for own in "qkv"
            for rule in weight_and_bias_rules(
                _OWN + f"attn.{own}_proj", LAYER + f"self_attn.{own}_proj", heads.get(own)
            )
        ),
        *(Rule.of(f"{_OWN}mlp.{own}.weight", f"{LAYER}mlp.{hub}.weight") for own, hub in projections.items()),
    )


def fused_projection_rules() -> tuple[Rule, ...]:
    """Return the rules for projections that are one matrix on the Hub."""
    query_key_value = tuple(f"{_OWN}attn.{own}_proj.weight" for own in "qkv")
    gate_and_up = tuple(f"{_OWN}mlp.{own}.weight" for own in ("w1", "w3"))
    parts = Concatenated(3, extents=("heads", "key_heads", "key_heads"))
    return (
        Rule.of(query_key_value, LAYER + "self_attn.qkv_proj.weight", Reversed(parts)),
        Rule.of(gate_and_up, LAYER + "mlp.gate_up_proj.weight", Reversed(Concatenated(2))),
    )


TORCHTUNE = Family(
    name="torchtune",
    types=_TYPES,
    rules=rules,
    trainer="torchtune",
)
