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


def nvfp4(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (44, 192)) -> Stored:
    """A weight as compressed-tensors stores NVFP4: the global scale divides the others."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16}
    return by_compressor("nvfp4-pack-quantized", shape, dtype, **weights)


def mxfp4(dtype: torch.dtype = torch.bfloat16) -> Stored:
    """A weight as compressed-tensors stores MXFP4, in rows."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True, "group_size": 32}
    return by_compressor("mxfp4-pack-quantized", (44, 192), dtype, **weights)


def mxfp8(dtype: torch.dtype = torch.bfloat16) -> Stored:
    """A weight as compressed-tensors stores MXFP8: exponents as bytes."""
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "symmetric": True, "group_size": 32}
    return by_compressor("mxfp8-quantized", (44, 192), dtype, **weights, scale_dtype="torch.uint8")


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def unpacked(raw: Tensor) -> Tensor:
    """The numbers in bytes, the low half first, by brute force."""
    halves = torch.stack([raw.view(torch.uint8) & 15, raw.view(torch.uint8) >> 4], -1)
    return FP4[halves.long()].flatten(-2)


def modelopt(shape: tuple[int, ...] = (44, 192), *, is_scalar: bool = True) -> Stored:
    """A weight as ModelOpt exports NVFP4: the second scale multiplies the others. Each byte occurs."""
    torch.manual_seed(5)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scales = (torch.rand(*shape[:-1], shape[-1] // 16) * 440 + 0.002).to(torch.float8_e4m3fn)
    second = torch.tensor(0.0003712) if is_scalar else torch.tensor([0.0003712])
    truth = unpacked(raw).unflatten(-1, (-1, 16)) * (scales.float() * second).unsqueeze(-1)
    tensors = {f"{X}.weight": raw, f"{X}.weight_scale": scales, f"{X}.weight_scale_2": second}
    tensors |= {f"{X}.input_scale": torch.tensor(0.1)}
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"}}
    return Stored(tensors, said, truth.flatten(-2))


def deepseek_v4(expert: str = "layers.3.ffn.experts.7.w1", dtype: torch.dtype = torch.int8) -> Stored:
    """An expert as DeepSeek V4 has it, in names of its own."""
    torch.manual_seed(6)
    raw = torch.randint(0, 256, (44, 96), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (44, 6), dtype=torch.uint8)
    truth = unpacked(raw).unflatten(-1, (-1, 32)) * torch.exp2(exponents.float() - 127).unsqueeze(-1)
    scales = exponents.view(torch.float8_e8m0fnu)
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    tensors = {f"{expert}.weight": raw.view(dtype), f"{expert}.scale": scales}
    return Stored(tensors, said, truth.flatten(-2), name=f"{expert}.weight", more={"expert_dtype": "fp4"})


def mlx(bits: int, size: int = 64, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (44, 192)) -> Stored:
    """A weight as MLX stores it, computed as its documentation says, in the dtype of the scales."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.int64)
    ones = (codes.unsqueeze(-1) >> torch.arange(bits)) & 1
    bytes_of = (ones.flatten(-2).unflatten(-1, (-1, 8)) << torch.arange(8)).sum(-1).to(torch.uint8)
    grid = (*shape[:-1], shape[-1] // size)
    scales, biases = (torch.randn(grid).to(dtype), torch.randn(grid).to(dtype))
    truth = codes.to(dtype).unflatten(-1, (-1, size)) * scales.unsqueeze(-1) + biases.unsqueeze(-1)
    tensors = {f"{X}.weight": bytes_of.view(torch.uint32), f"{X}.scales": scales, f"{X}.biases": biases}
    said = {"group_size": size, "bits": bits, "mode": "affine"}
    return Stored(tensors, said, truth.flatten(-2), section="quantization")
