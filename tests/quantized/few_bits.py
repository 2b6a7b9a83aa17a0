"""Weights of few bits as the libraries store them, and what the libraries make of them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

X = "model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Stored:
    """A weight as a library stores it, what its config says, and the plain weight that it makes of it."""

    tensors: Mapping[str, Tensor]
    said: Mapping[str, Any]
    truth: Tensor
    section: str = "quantization_config"
    name: str = f"{X}.weight"
    more: Mapping[str, Any] = field(default_factory=dict)


def weight(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of several magnitudes, a row of zeros among them."""
    torch.manual_seed(len(shape) + shape[-1])
    made = torch.randn(*shape) * torch.logspace(-3, 1, shape[-2])[:, None]
    made[..., 1, :] = 0
    return made.to(dtype)


def scheme_of(weights: Mapping[str, Any]) -> Any:
    library = pytest.importorskip("compressed_tensors.quantization", reason="the library is the judge")
    return library.QuantizationScheme(targets=["Linear"], weights=library.QuantizationArgs(**weights))


def said_of(weights: Mapping[str, Any], form: str) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def by_compressor(form: str, shape: tuple[int, ...], dtype: torch.dtype, **weights: Any) -> Stored:
    """A weight by one of compressed-tensors' own compressors, with scales of its own."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, plain = scheme_of(weights), weight(shape, dtype)
    size = weights.get("group_size") or (plain.shape[-1] if weights["strategy"] == "channel" else None)
    parts = plain.unflatten(-1, (-1, size)) if size else plain.reshape(1, 1, -1)
    low, high = parts.amin(-1), parts.amax(-1)
    state: dict[str, Tensor] = {"weight": plain}
    level = None
    if weights["strategy"] == "tensor_group":
        level = state["weight_global_scale"] = generate_gparam(plain.amin().reshape(1), plain.amax().reshape(1))
    scale, zero = calculate_qparams(low, high, scheme.weights, global_scale=level)
    state["weight_scale"] = scale if size else scale.reshape(1)
    if not weights.get("symmetric", True):
        state["weight_zero_point"] = zero if size else zero.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    truth = compressor.decompress(dict(packed), scheme)["weight"]
    return Stored({f"{X}.{name}": tensor for name, tensor in packed.items()}, said_of(weights, form), truth)


def integers(
    bits: int,
    strategy: str = "group",
    *,
    size: int | None = 32,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (44, 192),
    form: str = "pack-quantized",
) -> Stored:
    """A weight as compressed-tensors packs integers; 44 rows are no multiple of the eight zero points in a word."""
    size = size if strategy == "group" else None
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "group_size": size}
    return by_compressor(form, shape, dtype, **weights)
