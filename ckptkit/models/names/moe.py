"""Say what the tensors of a mixture of experts are called on the Hub, which differs by the type of the model."""

from __future__ import annotations

from typing import NamedTuple

from ckptkit.models.names.sizes import Sizes

LAYER = "model.layers.{layer}."


class ExpertNames(NamedTuple):
    """The modules of a mixture of experts on the Hub, below a layer: gate, up and down projection, and the router."""

    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    router: str = "mlp.gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"


_MIXTRAL = ExpertNames(
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
    router="block_sparse_moe.gate",
    bias="block_sparse_moe.e_score_correction_bias",
)
_EXPERTS = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "qwen2_moe": ExpertNames(shared="mlp.shared_expert"),
    "qwen3_next": ExpertNames(shared="mlp.shared_expert"),
}

# types whose files have a tensor for each expert, and whose fused experts have all gates above all up projections
SEPARATE = frozenset(
    {
        *("mixtral", "minimax", "minimax_m2", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"),
        *("qwen3_omni_moe_text", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
        *("ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe", "kimi_k25", "longcat_flash", "solar_open"),
    }
)


def experts_of(model_type: str) -> ExpertNames:
    """Return the names for a type of model; those of most for one that is not listed."""
    return _EXPERTS.get(model_type, ExpertNames())


def has_experts(layer: int, sizes: Sizes) -> bool:
    """Return whether a layer of a mixture has experts, by the keys of `Glm4MoeConfig` and `Qwen2MoeConfig`."""
    config = sizes.text
    first = config.get("first_k_dense_replace", 1 if sizes.model_type == "glm4_moe" else 0)
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    is_behind = type(first) is not int or layer >= first
    is_nth = type(step) is not int or step < 1 or (layer + 1) % step == 0
    return is_behind and is_nth and not (isinstance(dense, list) and layer in dense)
