"""The names of torchtitan, in all its versions, and the rules that translate them to the Hub's.

Source: torchtitan/models/{llama3,llama4,qwen3,deepseek_v3,gpt_oss}/state_dict_adapter.py, and their history: the head
was named `output`; the projections were directly in `attention`, and for two months in one matrix; the names of
experts had no letters for their axes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule, weight_and_bias_rules
from ckptkit.models.names.sizes import LAYER, Sizes, expert_names_of_type
from ckptkit.models.names.steps import (
    Chain,
    Concatenated,
    Each,
    Grouped,
    RequiredExtent,
    Reversed,
    Rotary,
    Same,
    SwappedAxes,
    TensorStep,
)

_INTERLEAVED = ("llama",)  # types whose rotary embeddings rotate adjacent pairs in torchtitan, and halves on the Hub
_DEEPSEEK, _GPT_OSS, _LLAMA4 = "deepseek_v3", "gpt_oss", "llama4_text"
_TYPES = (*_INTERLEAVED, "qwen3", "qwen3_moe", _DEEPSEEK, _GPT_OSS, _LLAMA4)
_ATTENTION = "layers.{layer}.attention."
_EXPERTS = "layers.{layer}.moe."


def rules(sizes: Sizes, *, old_first: bool = False) -> tuple[Rule, ...]:
    """Return a model type's table; with `old_first`, names before 0.3 come first. Raises `Unsupported` for others."""
    model = sizes.require_type(TORCHTITAN.name, _TYPES)
    prefix = "language_model." if model == _LLAMA4 and "text_config" in sizes.config else ""
    layer = prefix + LAYER
    names = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.q_norm": "self_attn.q_a_layernorm" if model == _DEEPSEEK else "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    if model == _DEEPSEEK:  # multi-head latent attention (MLA)
        latent = {"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj"}
        latent |= {"wq_a": "q_a_proj", "wq_b": "q_b_proj"}
        names |= {f"attention.{own}": f"self_attn.{hub}" for own, hub in latent.items()}
    return (
        Rule.of("tok_embeddings.weight", prefix + "model.embed_tokens.weight"),
        Rule.of("norm.weight", prefix + "model.norm.weight"),
        Rule.of(join_alternatives("lm_head.weight", "output.weight", old_first=old_first), prefix + "lm_head.weight"),
        *(Rule.of(f"layers.{{layer}}.{own}.weight", f"{layer}{hub}.weight") for own, hub in names.items()),
        *attention_rules(layer, is_in_pairs=model in _INTERLEAVED, old_first=old_first or model == _DEEPSEEK),
        *weight_and_bias_rules(_ATTENTION + "wo", layer + "self_attn.o_proj"),
        *feed_forward_rules("layers.{layer}.feed_forward", layer + ("feed_forward" if model == _LLAMA4 else "mlp")),
        *{_GPT_OSS: mixture_rules_with_biases, _LLAMA4: fused_mixture_rules}.get(model, mixture_rules)(
            model, layer, old_first
        ),
    )


def attention_rules(layer: str, *, is_in_pairs: bool, old_first: bool) -> tuple[Rule, ...]:
    """Return the rules for queries, keys and values, as separate matrices or as one."""
    steps: tuple[TensorStep, ...] = (Same(), Same(), Same())
    if is_in_pairs:
        steps = (Rotary("heads"), Rotary("key_heads"), Same())
    hub = tuple(f"{layer}self_attn.{one}_proj" for one in "qkv")
    separate: list[Rule] = []
    for own, hub_name, step in zip(("wq", "wk", "wv"), hub, steps, strict=True):
        names = join_alternatives(f"{_ATTENTION}qkv_linear.{own}", _ATTENTION + own, old_first=old_first)
        separate += weight_and_bias_rules(names, hub_name, step)
    return (*separate, *weight_and_bias_rules(f"{_ATTENTION}qkv_linear.wqkv", hub, Chain((Grouped(), Each(steps)))))


def feed_forward_rules(own: str, hub: str) -> tuple[Rule, ...]:
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return tuple(Rule.of(f"{own}.{one}.weight", f"{hub}.{other}.weight") for one, other in names.items())


def join_alternatives(*texts: str, old_first: bool) -> str:
    """Return all alternative names of a tensor, newest first; oldest first if `old_first`. The first is written."""
    return " | ".join(reversed(texts) if old_first else texts)


def expert_alternatives(name: str, letters: str, old_first: bool) -> str:
    inner = f"routed_experts.inner_experts.{name}_{letters}"
    return join_alternatives(
        *(_EXPERTS + own for own in (inner, f"experts.{name}_{letters}", f"experts.{name}")), old_first=old_first
    )


def mixture_rules(model: str, layer: str, old_first: bool) -> tuple[Rule, ...]:
    """Return the rules for a mixture whose experts are separate tensors on the Hub."""
    hub = expert_names_of_type(model)
    bias = Rule.of(
        join_alternatives(_EXPERTS + "expert_bias_E", _EXPERTS + "expert_bias", old_first=old_first), layer + hub.bias
    )
    return (
        Rule.of(f"{_EXPERTS}router.gate.weight", f"{layer}{hub.router}.weight"),
        *([bias] if model == _DEEPSEEK else []),
        Rule.of(expert_alternatives("w1", "EFD", old_first), f"{layer}{hub.gate}.weight", RequiredExtent(1, "hidden")),
        Rule.of(expert_alternatives("w3", "EFD", old_first), f"{layer}{hub.up}.weight", RequiredExtent(1, "hidden")),
        Rule.of(expert_alternatives("w2", "EDF", old_first), f"{layer}{hub.down}.weight", RequiredExtent(0, "hidden")),
        *feed_forward_rules(_EXPERTS + "shared_experts", layer + hub.shared),
    )


def fused_mixture_rules(_model: str, layer: str, old_first: bool) -> tuple[Rule, ...]:
    """Return the rules for a mixture whose experts are fused on the Hub too, and transposed."""
    hub = layer + "feed_forward."
    gate_up = (expert_alternatives("w1", "EFD", old_first), expert_alternatives("w3", "EFD", old_first))
    both = Chain((RequiredExtent(2, "hidden"), SwappedAxes((1, 2)), Reversed(Concatenated(2, axis=2))))
    down = Chain((RequiredExtent(1, "hidden"), SwappedAxes((1, 2))))
    return (
        Rule.of(f"{_EXPERTS}router.gate.weight", hub + "router.weight"),
        Rule.of(gate_up, hub + "experts.gate_up_proj", both),
        Rule.of(expert_alternatives("w2", "EDF", old_first), hub + "experts.down_proj", down),
        *feed_forward_rules(_EXPERTS + "shared_experts", hub + "shared_expert"),
    )


def mixture_rules_with_biases(_model: str, layer: str, old_first: bool) -> tuple[Rule, ...]:
    """Return the rules for a mixture with biases: its experts have two matrices each, transposed on the Hub."""
    hub = layer + "mlp.experts."
    first, second = (Chain((RequiredExtent(axis, "hidden"), SwappedAxes((1, 2)))) for axis in (2, 1))
    return (
        Rule.of(_ATTENTION + "sinks", layer + "self_attn.sinks"),
        *weight_and_bias_rules(_EXPERTS + "router.gate", layer + "mlp.router"),
        Rule.of(expert_alternatives("mlp1_weight", "EGD", old_first), hub + "gate_up_proj", first),
        Rule.of(expert_alternatives("mlp1_bias", "EG", old_first), hub + "gate_up_proj_bias"),
        Rule.of(expert_alternatives("mlp2_weight", "EDF", old_first), hub + "down_proj", second),
        Rule.of(expert_alternatives("mlp2_bias", "ED", old_first), hub + "down_proj_bias"),
    )


TORCHTITAN = Family(
    name="torchtitan",
    types=_TYPES,
    drops=(r"freqs_cis", r"rope\.cache", r"layers\.#\.moe\.(tokens_per_expert.*|expert_bias(_E)?)"),
    rules=rules,
    trainer="torchtitan",
    has_tied_head=True,
)
BEFORE_0_3 = replace(TORCHTITAN, name="torchtitan-0.2", rules=partial(rules, old_first=True))
