"""Layouts made by hand, of tensors that are cut in rows among ranks; nothing of them is on a disk."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path

from ckptkit.layout import Blob, Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DType, parse_dtype

F32: DType = parse_dtype("float32")


def cut_among(ranks: int, shapes: Mapping[str, tuple[int, int]], *, form: str = "dcp") -> Layout:
    """Each rank has as many rows as any other, but the last that have any."""
    offsets = count(0, 1 << 20)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        most = -(-rows // ranks)
        chunks = []
        for rank in range(ranks):
            start = min(rank * most, rows)
            size = min(most, rows - start)
            path = f"__{rank}_0.distcp" if form == "dcp" else f"model-{rank + 1:05}-of-{ranks:05}.safetensors"
            chunks.append(Chunk(Box((start, 0), (size, columns)), path, next(offsets), 4 * size * columns, F32))
        tensors[name] = StoredTensor(Spec(F32, (rows, columns)), tuple(chunks))
    return Layout(Path("nowhere"), form, tensors, world_size=ranks if form == "dcp" else None)


def llama(layers: int) -> dict[str, tuple[int, int]]:
    """The shapes of a small model in the manner of Llama."""
    shapes = {"model.embed_tokens.weight": (640, 8)}
    for layer in range(layers):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (512, 8 if name.startswith("self") else 16)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (512, 1)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (512, 1)
    return shapes


def with_blob(layout: Layout, path: str, length: int) -> Layout:
    """The layout with an entry that is no tensor."""
    return Layout(layout.root, layout.format, layout.tensors, {"rest": Blob(path, 1 << 60, length)})
