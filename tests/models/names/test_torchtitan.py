"""torchtitan's names against what its adapters do, written down here in torch: they import what no test can have.

Source: torchtitan/models/{llama3,llama4,qwen3,deepseek_v3,gpt_oss}/state_dict_adapter.py, of the spring of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.models.names import families_with, find_family_of, get_family
from ckptkit.models.names.sizes import Sizes
from tests.models.names.hub_models import EXPERTS, HEAD, HEADS, HIDDEN, INNER, KEY_HEADS, config_of, saved
from tests.models.names.shelf import (
    check_both_ways,
    check_same,
    random_like,
    shelve,
    to_the_family,
    to_the_hub,
    unshelve,
)
from tests.tiers import nightly_but

_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.sinks": "attention.sinks",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "feed_forward.shared_expert.gate_proj": "moe.shared_experts.w1",
    "feed_forward.shared_expert.up_proj": "moe.shared_experts.w3",
    "feed_forward.shared_expert.down_proj": "moe.shared_experts.w2",
    "feed_forward.router": "moe.router.gate",
    "mlp.router": "moe.router.gate",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.down_proj": "feed_forward.w2",
}
_INNER = "moe.routed_experts.inner_experts."


def permute(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head in pairs, as `StateDictAdapter._reverse_permute` has them."""
    return weight.view(heads, 2, HEAD // 2, -1).transpose(1, 2).reshape(weight.shape)


def adapted(model_type: str, hub: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `from_hf` makes of the Hub's tensors, under the newest names."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in hub.items():
        own = name.removeprefix("language_model.").replace("model.layers", "layers")
        expert = re.fullmatch(r"(layers\.\d+\.)mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", own)
        fused = re.fullmatch(r"(layers\.\d+\.)(?:mlp|feed_forward)\.experts\.(gate_up|down)_proj(_bias)?", own)
        if expert:
            leaf = {"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}[expert[3]]
            experts.setdefault(f"{expert[1]}{_INNER}{leaf}", {})[int(expert[2])] = tensor
            continue
        if fused and model_type == "gpt_oss":
            number = {"gate_up": "1", "down": "2"}[fused[2]]
            letters = {"1": "EG", "2": "ED"}[number]
            leaf = (
                f"mlp{number}_bias_{letters}" if fused[3] else f"mlp{number}_weight_{'EGD' if number == '1' else 'EDF'}"
            )
            found[f"{fused[1]}{_INNER}{leaf}"] = tensor if fused[3] else tensor.transpose(1, 2)
            continue
        if fused and fused[2] == "gate_up":
            w1, w3 = tensor.chunk(2, dim=-1)
            found[f"{fused[1]}{_INNER}w1_EFD"] = w1.transpose(-1, -2)
            found[f"{fused[1]}{_INNER}w3_EFD"] = w3.transpose(-1, -2)
            continue
        if fused:
            found[f"{fused[1]}{_INNER}w2_EDF"] = tensor.transpose(-1, -2)
            continue
        hub_part = max((part for part in _NAMES if part in own), key=len, default="")
        own = own.replace(hub_part, _NAMES[hub_part]) if hub_part else own
        one = tensor
        if model_type == "llama" and own.endswith(("wq.weight", "wk.weight")):
            one = permute(tensor, HEADS if own.endswith("wq.weight") else KEY_HEADS)
        if model_type != "deepseek_v3":
            own = re.sub(r"attention\.(w[qkv])\.", r"attention.qkv_linear.\1.", own)
        found[own] = one
    found |= {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def older(name: str) -> str:
    """What a tensor was called before version 0.3."""
    name = name.replace("attention.qkv_linear.", "attention.").replace("lm_head.", "output.")
    name = name.replace("moe.routed_experts.inner_experts.", "moe.experts.")
    return re.sub(r"(moe\.(?:experts\.\w+|expert_bias))_E[A-Z]*", r"\1", name)


_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "mlp_only_layers": [0]},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "llama4_text": {"num_local_experts": EXPERTS, "intermediate_size_mlp": 20, "interleave_moe_layer_step": 2},
}


@pytest.mark.parametrize("model_type", nightly_but([*_CHANGES][:3], _CHANGES))
def test_what_its_adapters_do(model_type: str, tmp_path: Path) -> None:
    """Equal names and bits, of weights and of moments; under the older names too, both ways."""
    config = config_of(model_type, **_CHANGES[model_type])
    hub = saved(config, tmp_path)
    for arrays in (hub, random_like(hub)):
        own = adapted(model_type, arrays)
        check_both_ways("torchtitan", own, arrays, config.to_dict())
        before = {older(name): tensor for name, tensor in own.items()}
        check_both_ways("torchtitan-0.2", before, arrays, config.to_dict())
        check_same(to_the_hub("torchtitan", before, config.to_dict()), arrays)


def test_deepseek_without_a_query_rank(tmp_path: Path) -> None:
    config = config_of("deepseek_v3", **(_CHANGES["deepseek_v3"] | {"q_lora_rank": None}))
    hub = saved(config, tmp_path)
    own = adapted("deepseek_v3", hub)
    assert "layers.0.attention.wq.weight" in own
    check_both_ways("torchtitan", own, hub, config.to_dict())


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_fused_matrix_of_two_months(model_type: str, tmp_path: Path) -> None:
    """`wqkv`, as `separate_to_fused_qkv` makes it."""
    config = config_of(model_type)
    hub = saved(config, tmp_path)
    own = adapted(model_type, hub)
    for layer in range(2):
        at = f"layers.{layer}.attention.qkv_linear."
        q, k, v = (own.pop(f"{at}{name}.weight").view(KEY_HEADS, -1, HEAD, HIDDEN) for name in ("wq", "wk", "wv"))
        own[f"{at}wqkv.weight"] = torch.cat([q, k, v], dim=1).reshape(-1, HIDDEN)
    check_same(to_the_hub("torchtitan", own, config.to_dict()), hub)


def test_experts_the_other_way_round(tmp_path: Path) -> None:
    """Before the letters of their axes, some versions had them `[E, D, F]` under the same names."""
    config = config_of("qwen3_moe", **_CHANGES["qwen3_moe"])
    own = {older(name): tensor for name, tensor in adapted("qwen3_moe", saved(config, tmp_path)).items()}
    own["layers.1.moe.experts.w1"] = own["layers.1.moe.experts.w1"].transpose(1, 2).contiguous()
    with pytest.raises(Mismatch, match=r"expected 32 along axis 1 .*, found shape \[32, 24\]"):
        to_the_hub("torchtitan", own, config.to_dict())


def test_the_bias_of_a_router_that_the_hub_has_not(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", **_CHANGES["qwen3_moe"])
    hub = saved(config, tmp_path)
    own = adapted("qwen3_moe", hub) | {"layers.1.moe.expert_bias": torch.zeros(EXPERTS), "freqs_cis": torch.zeros(2)}
    check_same(to_the_hub("torchtitan", own, config.to_dict()), hub)


def test_heads_that_predict_further_are_refused() -> None:
    own = {"layers.0.attention.wq.weight": torch.zeros(32, 32), "mtp_layers.0.enorm.weight": torch.zeros(32)}
    with pytest.raises(Mismatch, match="no rule translates it") as caught:
        to_the_hub("torchtitan", own, config_of("llama").to_dict())
    assert caught.value.tensor == "mtp_layers.0.enorm.weight"


def test_other_types_are_refused() -> None:
    with pytest.raises(Unsupported, match="`qwen3_5`"):
        to_the_hub("torchtitan", {"norm.weight": torch.zeros(2)}, {"model_type": "qwen3_5"})


def test_a_tied_head(tmp_path: Path) -> None:
    """Torchtitan has the embedding twice."""
    from ckptkit.models.names.between_families import make_translation

    config = config_of("qwen3", tie_word_embeddings=True)
    hub = saved(config, tmp_path)
    assert "lm_head.weight" not in hub
    tensors, file = shelve(hub)
    made = make_translation(None, get_family("torchtitan"), Sizes(config.to_dict()))(tensors)
    found = unshelve(made.tensors, file)
    assert torch.equal(found["lm_head.weight"], found["tok_embeddings.weight"])
    assert made.came_from["lm_head.weight"] == ("model.embed_tokens.weight",)


def test_names_that_families_share(tmp_path: Path) -> None:
    """Torchtitan's names of before 0.3 are Meta's: the tables say the same of every type that both have."""
    config = config_of("llama")
    own = to_the_family("meta", saved(config, tmp_path), config.to_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    told = families_with(shapes)
    assert [family.name for family in told] == ["torchtitan-0.2", "meta"]
    assert set.intersection(*(set(family.types) for family in told)) == {"llama"}
    check_same(*(to_the_hub(family.name, own, config.to_dict()) for family in told))
    for trainer, model_type, name in (
        ("torchtitan", "llama", "torchtitan-0.2"),
        ("Meta, or in its format", "llama", "meta"),
        (None, "mistral", "meta"),
        (None, "qwen3", "torchtitan-0.2"),
    ):
        family = find_family_of(shapes, trainer, model_type)
        assert family is not None
        assert family.name == name
    assert find_family_of(shapes, None, "", lambda file: file == "params.json") is get_family("meta")
