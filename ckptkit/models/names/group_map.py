"""Know the values of an optimizer's groups that Megatron-FSDP saves by parameter, and whose they are.

Source: `_param_groups_to_param2group_meta` in megatron/core/optimizer/distrib_optimizer.py of core 0.20, and
megatron/core/transformer/fsdp_dtensor_checkpoint.py. The map has the names of the module's parameters. Weights and
states lie under these, or in pieces and under names that are the same for every version.
"""

from __future__ import annotations

import re

GROUP_MAP = "param_to_group_meta"
HALVES = ("_w", "_v")  # of a gated layer
_SAVED_AS = (  # pieces, and names of other versions, and what they are compared as
    (r"((?:weight|bias)\d*)_[wv]$", r"\1"),
    (r"((?:in_proj|conv1d)\.(?:weight|bias))\.(?:query|key|value|z|beta|alpha)$", r"\1"),
    (r"self_attention\.linear_qkv_down_proj\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"linear_(?:q|kv)_down_proj\.", "linear_qkv_down_proj."),
    (r"\bmtp_model_layer\.", "transformer_layer."),
)


def parameter_of(name: str) -> str:
    """Return a name that is the same for a parameter in the map and for all that is saved of it."""
    for pattern, same in _SAVED_AS:
        name = re.sub(pattern, same, name)
    return name
