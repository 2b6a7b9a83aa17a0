"""Know the names of torchtitan, before and after its version 0.3, and map them to the Hub's.

Source: torchtitan/models/{llama3,qwen3,deepseek_v3}/state_dict_adapter.py, and their history: the head was `output`,
projections lay in `attention` itself, experts had no letters for their axes.
"""

from __future__ import annotations

from ckptkit.checkpoints.families.family import Family
from ckptkit.checkpoints.families.moe import LAYER, experts_of
from ckptkit.checkpoints.families.rule import Rule, with_bias
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.families.steps import Rotary
from ckptkit.errors import Unsupported

_IN_PAIRS = ("llama",)  # types whose rotary embeddings turn pairs of neighbours here, and halves on the Hub
_AS_THERE = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
_ATTENTION = "layers.{layer}.attention."
_EXPERTS = "layers.{layer}.moe."


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    """Return the table for a type of model. Raises `Unsupported` for one that is not known here."""
    model = sizes.model_type
    if model not in (*_IN_PAIRS, *_AS_THERE):
        known = ", ".join((*_IN_PAIRS, *_AS_THERE))
        raise Unsupported(f"torchtitan's names of a model of type `{model}` are not known", hint=f"known are {known}")
    in_pairs = model in _IN_PAIRS
    return (
        Rule.of("tok_embeddings.weight", "model.embed_tokens.weight"),
        Rule.of("norm.weight", "model.norm.weight"),
        Rule.of("lm_head.weight | output.weight", "lm_head.weight"),
        *norms(model),
        *attention("wq", "q_proj", "heads" if in_pairs else None),
        *attention("wk", "k_proj", "key_heads" if in_pairs else None),
        *attention("wv", "v_proj", None),
        *with_bias(_ATTENTION + "wo", LAYER + "self_attn.o_proj"),
        *feed_forward("layers.{layer}.feed_forward", LAYER + "mlp"),
        *mixture(model),
        *latent_attention(),
    )


def norms(model: str) -> tuple[Rule, ...]:
    """Return the rules for the norms of a layer."""
    names = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.q_norm": "self_attn.q_a_layernorm" if model == "deepseek_v3" else "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    return tuple(Rule.of(f"layers.{{layer}}.{own}.weight", f"{LAYER}{hub}.weight") for own, hub in names.items())


def attention(own: str, hub: str, heads: str | None) -> tuple[Rule, ...]:
    """Return the rules for a projection of so many heads, whose rows are in pairs; of None, if they are as there."""
    names = f"{_ATTENTION}qkv_linear.{own} | {_ATTENTION}{own}"
    return tuple(with_bias(names, f"{LAYER}self_attn.{hub}", Rotary(heads) if heads else None))


def feed_forward(own: str, hub: str) -> tuple[Rule, ...]:
    """Return the rules for three projections."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return tuple(Rule.of(f"{own}.{one}.weight", f"{hub}.{other}.weight") for one, other in names.items())


def mixture(model: str) -> tuple[Rule, ...]:
    """Return the rules for a mixture of experts, all of which lie in one tensor."""
    hub = experts_of(model)
    return (
        Rule.of(f"{_EXPERTS}router.gate.weight", f"{LAYER}{hub.router}.weight"),
        Rule.of(f"{_EXPERTS}expert_bias_E | {_EXPERTS}expert_bias", LAYER + hub.bias),
        *(
            Rule.of(
                f"{_EXPERTS}routed_experts.inner_experts.{own}_{axes}"
                f" | {_EXPERTS}experts.{own}_{axes} | {_EXPERTS}experts.{own}",
                f"{LAYER}{name}.weight",
            )
            for own, axes, name in (("w1", "EFD", hub.gate), ("w3", "EFD", hub.up), ("w2", "EDF", hub.down))
        ),
        *feed_forward(_EXPERTS + "shared_experts", LAYER + hub.shared),
    )


def latent_attention() -> tuple[Rule, ...]:
    """Return the rules for attention with latent heads."""
    names = {
        "wkv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "wkv_b": "kv_b_proj",
        "wq_a": "q_a_proj",
        "wq_b": "q_b_proj",
    }
    return tuple(Rule.of(f"{_ATTENTION}{own}.weight", f"{LAYER}self_attn.{hub}.weight") for own, hub in names.items())


TORCHTITAN = Family(
    name="torchtitan",
    tells=(r"layers\.#\.attention\.(qkv_linear\.)?w[qkv]\.weight", r"layers\.#\.attention\.wkv_a\.weight"),
    drops=(r"freqs_cis", r"rope\.cache", r"(layers\.#\.moe\.)?(tokens_per_expert.*)"),
    rules=rules,
    trainer="torchtitan",
)
