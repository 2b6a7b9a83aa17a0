"""Make of a model of the Hub the arrays that MaxText has, in numpy alone.

`test_maxtext.py` compares the way back with MaxText's own code where that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

_LEAVES = {
    "self_attn.q_proj": "self_attention.query.kernel",
    "self_attn.k_proj": "self_attention.key.kernel",
    "self_attn.v_proj": "self_attention.value.kernel",
    "self_attn.o_proj": "self_attention.out.kernel",
    "self_attn.q_norm": "self_attention.query_norm.scale",
    "self_attn.k_norm": "self_attention.key_norm.scale",
    "mlp.gate_proj": "mlp.wi_0.kernel",
    "mlp.up_proj": "mlp.wi_1.kernel",
    "mlp.down_proj": "mlp.wo.kernel",
}
_NORMS = {
    "input_layernorm": "pre_self_attention_layer_norm.scale",
    "post_attention_layernorm": "post_self_attention_layer_norm.scale",
}
_GEMMA_NORMS = {
    "input_layernorm": "pre_self_attention_norm.scale",
    "post_attention_layernorm": "post_self_attention_norm.scale",
    "pre_feedforward_layernorm": "pre_ffw_norm.scale",
    "post_feedforward_layernorm": "post_ffw_norm.scale",
}


def maxtext_arrays(
    hub: Mapping[str, np.ndarray], config: Mapping[str, Any], *, is_scanned: bool, padding: int
) -> Arrays:
    """Return the arrays of MaxText by their names; the embedding has so many rows of `padding` more."""
    model, layers = config["model_type"], config["num_hidden_layers"]
    is_gemma = model.startswith("gemma")
    stacks: dict[str, dict[int, np.ndarray]] = {}
    made: Arrays = {}
    for name, value in hub.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
        if found is None:
            own, array = top(name, value, config, padding, is_gemma=is_gemma)
            made[own] = array
            continue
        leaf = (_LEAVES | (_GEMMA_NORMS if is_gemma else _NORMS))[found[2]]
        array = in_layer(leaf, value, config)
        where, index = place(int(found[1]), leaf, model, layers, is_scanned=is_scanned)
        stacks.setdefault(where, {})[index] = array
    for where, parts in stacks.items():
        stacked = np.stack([parts[i] for i in range(len(parts))], axis=1) if -1 not in parts else parts[-1]
        made[where] = stacked
    return made


def top(name: str, value: np.ndarray, config: Mapping[str, Any], padding: int, *, is_gemma: bool) -> tuple[str, Any]:
    if name == "lm_head.weight":
        return "decoder.logits_dense.kernel", value.T
    if name == "model.norm.weight":
        return "decoder.decoder_norm.scale", value + np.float32(is_gemma)
    padded = np.pad(value, ((0, padding), (0, 0)))
    return "token_embedder.embedding", padded * np.float32(config["hidden_size"] ** 0.5 if is_gemma else 1)


def in_layer(leaf: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Return the array of one layer."""
    model, width, hidden = config["model_type"], config["head_dim"], config["hidden_size"]
    if leaf.endswith("scale"):
        return value + np.float32(model.startswith("gemma"))
    if leaf == "self_attention.out.kernel":
        return value.T.reshape(-1, width, hidden)
    if not leaf.startswith("self_attention"):
        return value.T
    array = value.T.reshape(hidden, -1, width)
    if model == "llama" and "value" not in leaf:
        array = np.stack((array[..., : width // 2], array[..., width // 2 :]), axis=-1).reshape(array.shape)
    return array / np.float32(width**0.5) if model in ("llama", "gemma2") and "query" in leaf else array


def place(layer: int, leaf: str, model: str, layers: int, *, is_scanned: bool) -> tuple[str, int]:
    """Return the name of the array that a layer is in, and where in it; -1 for one of its own."""
    number = layer
    if model == "gemma2":
        module, _, rest = leaf.partition(".")
        leaf, number = f"{module}_{('local', 'global')[layer % 2]}.{rest}", layer // 2
    if not is_scanned:
        return f"decoder.layers_{number}.{leaf}", -1
    if model != "gemma3_text":
        return f"decoder.layers.{leaf}", number
    whole = layers - layers % 6
    if layer >= whole:
        return f"decoder.layers_remainder.layers_{layer - whole}.{leaf}", -1
    return f"decoder.layers.layers_{layer % 6}.{leaf}", layer // 6
