"""Write a model of the shape of Kimi K2: a trillion parameters, of which the experts are packed integers of 4 bits.

The files are sparse: they have holes where the bytes of the weights would be, but for a few experts that are filled.
Imports no torch: memory is measured where this is used.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 7168, 2048, 384, 61, 163840
HEADS, Q_RANK, KV_RANK, NOPE, ROPE = 64, 1536, 512, 128, 64
GROUP = 32
_BYTES = {"BF16": 2, "F32": 4, "I32": 4}

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
CONFIG = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}


def packed(name: str, rows: int, columns: int) -> Tensors:
    """Return the tensors of one packed weight."""
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": ("BF16", (rows, columns // GROUP)),
        f"{name}.weight_shape": ("I32", (2,)),
    }


def plain(name: str, *shape: int) -> Tensors:
    return {f"{name}.weight": ("BF16", shape)}


def layer(number: int, experts: int = EXPERTS, weight: Callable[[str, int, int], Tensors] = packed) -> Tensors:
    """Return the tensors of a layer; the first has no experts. `weight` returns those of one weight of an expert."""
    at = f"model.layers.{number}"
    head = NOPE + ROPE
    tensors = plain(f"{at}.input_layernorm", HIDDEN) | plain(f"{at}.post_attention_layernorm", HIDDEN)
    tensors |= plain(f"{at}.self_attn.q_a_proj", Q_RANK, HIDDEN) | plain(f"{at}.self_attn.q_a_layernorm", Q_RANK)
    tensors |= plain(f"{at}.self_attn.q_b_proj", HEADS * head, Q_RANK)
    tensors |= plain(f"{at}.self_attn.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN)
    tensors |= plain(f"{at}.self_attn.kv_a_layernorm", KV_RANK)
    tensors |= plain(f"{at}.self_attn.kv_b_proj", HEADS * 2 * NOPE, KV_RANK)
    tensors |= plain(f"{at}.self_attn.o_proj", HIDDEN, HEADS * NOPE)
    inner, where = (18432, "mlp") if number == 0 else (INNER, "mlp.shared_experts")
    tensors |= plain(f"{at}.{where}.gate_proj", inner, HIDDEN) | plain(f"{at}.{where}.up_proj", inner, HIDDEN)
    tensors |= plain(f"{at}.{where}.down_proj", HIDDEN, inner)
    if number == 0:
        return tensors
    tensors |= plain(f"{at}.mlp.gate", experts, HIDDEN) | {
        f"{at}.mlp.gate.e_score_correction_bias": ("F32", (experts,))
    }
    for expert in range(experts):
        own = f"{at}.mlp.experts.{expert}"
        tensors |= weight(f"{own}.gate_proj", INNER, HIDDEN) | weight(f"{own}.up_proj", INNER, HIDDEN)
        tensors |= weight(f"{own}.down_proj", HIDDEN, INNER)
    return tensors


def ends() -> Tensors:
    """Return the tensors outside the layers: embedding, head and last norm."""
    embeddings = plain("model.embed_tokens", VOCABULARY, HIDDEN) | plain("lm_head", VOCABULARY, HIDDEN)
    return embeddings | plain("model.norm", HIDDEN)


def write(root: Path, layers: int = LAYERS, experts: int = EXPERTS, filled: int = 1) -> None:
    """Write the model, with bytes in all but holes for the first `filled` experts of layer 1, and for its scales."""
    root.mkdir(parents=True)
    index: dict[str, str] = {}
    for number in range(layers + 1):
        tensors = layer(number, experts) if number < layers else ends()
        file = root / f"model-{number + 1:06}-of-{layers + 1:06}.safetensors"
        places = write_holes(file, tensors)
        if number == 1:
            fill(file, {name: place for name, place in places.items() if is_filled(name, filled)})
        index |= dict.fromkeys(tensors, file.name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (root / "config.json").write_text(json.dumps(CONFIG))


def is_filled(name: str, filled: int) -> bool:
    """Return whether a tensor is of one of the experts that have bytes."""
    _, _, expert = name.partition(".experts.")
    return expert != "" and int(expert.partition(".")[0]) < filled


def write_holes(file: Path, tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Write a file with a header and a hole for its data. Returns where each tensor begins and ends in the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    places: dict[str, tuple[int, int]] = {}
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        places[name] = start, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
    return {name: (8 + len(text) + start, 8 + len(text) + stop) for name, (start, stop) in places.items()}


def fill(file: Path, places: dict[str, tuple[int, int]]) -> None:
    """Fill packed weights with integers, scales of 2^-7, and their shapes."""
    with file.open("r+b") as out:
        for name, data in contents(places):
            out.seek(places[name][0])
            out.write(data)


def contents(places: dict[str, tuple[int, int]]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of each tensor."""
    some = os.urandom(1 << 20)
    for name, (start, stop) in places.items():
        if name.endswith("_shape"):
            rows, columns = (HIDDEN, INNER) if ".down_proj." in name else (INNER, HIDDEN)
            yield name, struct.pack("<ii", rows, columns)
        else:
            data = some if name.endswith("_packed") else struct.pack("<H", 0x3C00)
            yield name, (data * -(-(stop - start) // len(data)))[: stop - start]
