"""Weights of few bits, as releases of 2026 have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tests.state.quantized.few_bits import Stored, X, deepseek_v4, mlx, modelopt

W = f"{X}.weight"
_GROUP = 32


def int4() -> Stored:
    """A weight as compressed-tensors packs integers of 4 bits: eight in a word, with a scale for each 32."""
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (8, 64))
    scales = torch.rand(8, 64 // _GROUP) + 0.5
    words = ((codes + 8).unflatten(-1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    tensors = {f"{W}_packed": packed, f"{W}_scale": scales, f"{W}_shape": torch.tensor([8, 64])}
    return Stored(tensors, said, codes * scales.repeat_interleave(_GROUP, 1))


FEW_BITS: Mapping[str, Callable[[], Stored]] = {
    "int4": int4,
    "nvfp4": modelopt,
    "mlx": partial(mlx, 4, dtype=torch.float32),
    "mxfp4": deepseek_v4,
}


def config_of(stored: Stored, **more: Any) -> dict[str, Any]:
    """The config.json of a model with such a weight, with more in its section on quantization."""
    return {"model_type": "unheard_of", stored.section: {**stored.said, **more}, **stored.more}
