"""Compute the names and shapes of a Llama's tensors. Imports no torch: memory is measured where this is used."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

Shapes = dict[str, tuple[int, ...]]


def llama(layers: int, *, hidden: int, inner: int, keys: int, vocabulary: int) -> Shapes:
    """Return the shape of each weight; `keys` is the width of all heads of keys, `inner` that of the feed-forward."""
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    ends = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    names = ends | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in names.items()}


def llama_of(elements: float) -> Shapes:
    """Return a Llama of about so many elements: of whole layers, and at least one."""
    hidden, inner, vocabulary = (2048, 5632, 32000) if elements >= 2.5e8 else (256, 704, 4096)
    widths = {"hidden": hidden, "inner": inner, "keys": hidden // 4, "vocabulary": vocabulary}
    ends, one = count(llama(0, **widths)), count(llama(1, **widths))
    return llama(max(1, round((elements - ends) / (one - ends))), **widths)


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the elements of all tensors."""
    return sum(prod(shape) for shape in shapes.values())
