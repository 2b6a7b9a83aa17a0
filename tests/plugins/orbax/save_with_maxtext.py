"""Run by a Python that has MaxText: save models in its names, and what its own conversion makes of them.

`save_with_maxtext.py OUT NAME` writes, of the config in OUT/config.json, OUT/{apart,scanned}/tree and
OUT/{apart,scanned}/hub.npz. NAME is a model of MaxText's with the same mapping.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"


def shape_of(name: str, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of an array of MaxText, of one layer."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "embedding": (config["vocab_size"], hidden),
        "logits_dense-kernel": (hidden, config["vocab_size"]),
        "query-kernel": (hidden, heads, width),
        "key-kernel": (hidden, key_heads, width),
        "value-kernel": (hidden, key_heads, width),
        "out-kernel": (heads, width, hidden),
        "wi_0-kernel": (hidden, inner),
        "wi_1-kernel": (hidden, inner),
        "wo-kernel": (inner, hidden),
        "query_norm-scale": (width,),
        "key_norm-scale": (width,),
    }
    return next((shape for end, shape in shapes.items() if name.endswith(end)), (hidden,))


def save(out: Path, name: str, *, is_scanned: bool) -> None:
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from maxtext.checkpoint_conversion.utils import hf_shape, param_mapping, utils

    text = json.loads((out / "config.json").read_text())
    vision = dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "image_size", "patch_size"), 1)
    is_nested = text["model_type"] == "gemma3_text"  # MaxText knows the config with a vision tower alone
    config = {"text_config": text, "vision_config": {**vision, "num_channels": 1}} if is_nested else text
    mapping = param_mapping.PARAM_MAPPING[name](config, None, is_scanned)
    hooks = param_mapping.HOOK_FNS[name](config, None, is_scanned, saving_to_hf=True)
    random = np.random.default_rng(0)
    tree: dict[str, Any] = {}
    for own, hub in mapping.items():
        if "vision" in own or own.endswith("-bias") or hub == []:
            continue
        shape = shape_of(own, text)
        stacked = (shape[0], len(hub), *shape[1:]) if isinstance(hub, list) else shape
        *above, leaf = own.removeprefix("params-").split("-")
        inner = tree
        for step in above:
            inner = inner.setdefault(step, {})
        inner[leaf] = jnp.asarray(random.standard_normal(stacked).astype("float32"))
    place = out / ("scanned" if is_scanned else "apart")
    training = {"params": {"params": tree}, "step": jnp.int32(7), "opt_state": {"mu": {"params": tree}}}
    ocp.PyTreeCheckpointer().save((place / "tree").absolute(), training)
    found = utils.detect_and_extract_checkpoint({"params": {"params": tree}})
    asked = SimpleNamespace(scan_layers=is_scanned, param_scan_axis=1, weight_dtype="float32")
    shapes = hf_shape.HF_SHAPE[name](config)
    made = [
        pair
        for own, array in found.items()
        for pair in utils.process_maxtext_param(own, array, mapping, hooks, shapes, asked)
    ]
    plain = {hub.replace("model.language_model.", "model."): np.asarray(array) for hub, array in made}
    np.savez(place / "hub.npz", allow_pickle=False, **plain)


if __name__ == "__main__":
    for flag in (False, True):
        save(Path(sys.argv[1]), sys.argv[2], is_scanned=flag)
