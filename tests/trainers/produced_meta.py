"""A model as Meta releases it, cut over 2 gloo ranks by fairscale's own layers, which are given whole weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks

DIM, HEADS, KEY_HEADS, HIDDEN, VOCABULARY, LAYERS = 16, 4, 2, 24, 32, 2
PARAMS = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KEY_HEADS, "vocab_size": VOCABULARY}


def llama(root: Path) -> Truth:
    """Write `llama2`, whose embedding is split by columns, and `llama3`, by rows; the truth has `llama3:NAME`."""
    return _on_ranks(2, _save_both, root)


def _save_both(root: Path) -> Mapping[str, Any]:
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel

    initialize_model_parallel(2)
    truth: dict[str, Tensor] = {}
    for i, version in enumerate(("llama2", "llama3")):
        torch.manual_seed(i)
        parts, whole = _cut(version)
        (root / version).mkdir(parents=True, exist_ok=True)
        torch.save(parts, root / version / f"consolidated.{dist.get_rank():02d}.pth")
        (root / version / "params.json").write_text(json.dumps(PARAMS))
        truth |= {f"{version}:{name}": value for name, value in whole.items()}
    return truth


def _cut(version: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's part of each tensor, and all of it."""
    from fairscale.nn.model_parallel.layers import (
        ColumnParallelLinear,
        ParallelEmbedding,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

    parts: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}

    def add(name: str, kind: Callable[..., nn.Module], *sizes: int, **options: bool) -> None:
        def initialize(weight: Tensor) -> Tensor:
            whole[name] = weight
            return nn.init.normal_(weight)

        weight = kind(*sizes, init_method=initialize, **options).weight
        assert isinstance(weight, Tensor)
        parts[name] = weight.detach()

    def linear(name: str, kind: Callable[..., nn.Module], inner: int, outer: int) -> None:
        add(name, kind, inner, outer, bias=False)

    def copy(name: str, value: Tensor) -> None:
        parts[name] = whole[name] = value

    embedding = ParallelEmbedding if version == "llama2" else VocabParallelEmbedding
    add("tok_embeddings.weight", embedding, VOCABULARY, DIM)
    for i in range(LAYERS):
        narrow = DIM // HEADS * KEY_HEADS
        for name, size in (("wq", DIM), ("wk", narrow), ("wv", narrow)):
            linear(f"layers.{i}.attention.{name}.weight", ColumnParallelLinear, DIM, size)
        linear(f"layers.{i}.attention.wo.weight", RowParallelLinear, DIM, DIM)
        linear(f"layers.{i}.feed_forward.w1.weight", ColumnParallelLinear, DIM, HIDDEN)
        linear(f"layers.{i}.feed_forward.w2.weight", RowParallelLinear, HIDDEN, DIM)
        linear(f"layers.{i}.feed_forward.w3.weight", ColumnParallelLinear, DIM, HIDDEN)
        copy(f"layers.{i}.attention_norm.weight", torch.rand(DIM))
        copy(f"layers.{i}.ffn_norm.weight", torch.rand(DIM))
    copy("norm.weight", torch.rand(DIM))
    copy("rope.freqs", torch.rand(DIM // HEADS // 2))
    linear("output.weight", ColumnParallelLinear, DIM, VOCABULARY)
    return parts, whole
