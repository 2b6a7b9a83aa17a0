"""Translate the names of OLMo-core to the Hub's names.

Source: olmo_core/nn/hf/convert.py. A norm comes before or after its block, depending on the model type. All experts of
a layer are stacked in one matrix, each transposed; the router is flattened. The norms of Gemma 3 and Qwen 3.5 are
greater by one than on the Hub; that would need arithmetic, so ckptkit refuses these types.
"""

from __future__ import annotations

from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule, weight_and_bias_rules
from ckptkit.models.names.sizes import LAYER, Sizes, expert_names_of_type
from ckptkit.models.names.steps import FlatFront, SwappedAxes

_BEFORE = ("llama", "qwen2", "qwen3")
_BEHIND = ("olmo2", "olmo3", "flex_olmo")
_TYPES = (*_BEFORE, *_BEHIND)
_OWN = "blocks.{layer}."
_MODULES = {
    "embeddings": "model.embed_tokens",
    "lm_head.norm": "model.norm",
    "lm_head.w_out": "lm_head",
    _OWN + "attention.w_q": LAYER + "self_attn.q_proj",
    _OWN + "attention.w_k": LAYER + "self_attn.k_proj",
    _OWN + "attention.w_v": LAYER + "self_attn.v_proj",
    _OWN + "attention.w_out": LAYER + "self_attn.o_proj",
    _OWN + "attention.q_norm": LAYER + "self_attn.q_norm",
    _OWN + "attention.k_norm": LAYER + "self_attn.k_norm",
    _OWN + "feed_forward.w1": LAYER + "mlp.gate_proj",
    _OWN + "feed_forward.w2": LAYER + "mlp.down_proj",
    _OWN + "feed_forward.w3": LAYER + "mlp.up_proj",
}


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type(OLMO.name, _TYPES)
    is_before = model in _BEFORE
    norms = {
        _OWN + "attention_norm": LAYER + ("input_layernorm" if is_before else "post_attention_layernorm"),
        _OWN + "feed_forward_norm": LAYER + ("post_attention_layernorm" if is_before else "post_feedforward_layernorm"),
    }
    plain = (rule for own, hub in (_MODULES | norms).items() for rule in weight_and_bias_rules(own, hub))
    return (*plain, *(mixture_rules() if model == "flex_olmo" else ()))


def mixture_rules() -> tuple[Rule, ...]:
    hub, own = expert_names_of_type("flex_olmo"), _OWN + "feed_forward_moe."
    projections = {"w1": hub.gate, "w3": hub.up, "w2": hub.down}
    return (
        Rule.of(own + "router.weight", f"{LAYER}{hub.router}.weight", FlatFront("experts")),
        *(
            Rule.of(f"{own}experts.mlp.{own_name}", f"{LAYER}{hub_name}.weight", SwappedAxes(), flat="experts")
            for own_name, hub_name in projections.items()
        ),
    )


OLMO = Family(
    name="olmo",
    types=_TYPES,
    rules=rules,
    trainer="OLMo-core",
    has_tied_head=True,
)
