"""Know the parameter group values that Megatron-FSDP saves by parameter, and which parameter they belong to."""

from __future__ import annotations

import re

# Megatron-FSDP saves the values of parameter groups by parameter, in a map.
#
# Source: `_param_groups_to_param2group_meta` in megatron/core/optimizer/distrib_optimizer.py of core 0.20, and
# megatron/core/transformer/fsdp_dtensor_checkpoint.py. The map has the module's parameter names. Weights and
# states have these names too, or are split, or have names that are equal in all versions.
GROUP_MAP = "param_to_group_meta"
HALVES = ("_w", "_v")  # suffixes of the two saved halves of a gated layer
_NORMALIZATIONS = (  # (pattern, replacement): removes the suffixes of split parameters and the differences of versions
    (r"((?:weight|bias)\d*)_[wv]$", r"\1"),
    (r"((?:in_proj|conv1d)\.(?:weight|bias))\.(?:query|key|value|z|beta|alpha)$", r"\1"),
    (r"self_attention\.linear_qkv_down_proj\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"linear_(?:q|kv)_down_proj\.", "linear_qkv_down_proj."),
    (r"\bmtp_model_layer\.", "transformer_layer."),
)


def normalized_parameter_name(name: str) -> str:
    """Return a normalized name: equal for a parameter in `GROUP_MAP` and for all entries that are saved for it."""
    for pattern, same in _NORMALIZATIONS:
        name = re.sub(pattern, same, name)
    return name
