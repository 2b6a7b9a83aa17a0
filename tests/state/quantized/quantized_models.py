"""Quantized models in real files, made by torch and by the libraries that define them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}


def written(root: Path, said: Mapping[str, Any] | None, *files: Mapping[str, Tensor]) -> Path:
    """Write a model of no known type, its tensors in as many files, and what its config says of quantization."""
    root.mkdir(parents=True)
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, root / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config: dict[str, Any] = {"model_type": "unheard_of", "architectures": ["X"]}
    (root / "config.json").write_text(json.dumps(config | ({"quantization_config": said} if said else {})))
    return root


def in_blocks(shape: tuple[int, ...], size: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits, each byte but NaN's two among them, and a scale for each block."""
    raw = torch.randint(0, 254, shape, dtype=torch.uint8)
    raw = torch.where(raw >= 127, raw + 1, raw)
    scales = torch.rand(*shape[:-2], ceil(shape[-2] / size[0]), ceil(shape[-1] / size[1])) * 3 + 1e-4
    return raw.view(E4M3), scales


def spread(scales: Tensor, shape: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """The scale of each number, by brute force."""
    rows = scales.repeat_interleave(size[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(size[1], -1)[..., : shape[-1]]


def deepseek(root: Path) -> tuple[Path, dict[str, Tensor]]:
    """Blocks with ragged edges, and experts in one parameter; the scales in another file. And the plain model."""
    torch.manual_seed(1)
    shapes = {
        "model.layers.0.kv_a.weight": (576, 200),
        "model.layers.0.ragged.weight": (192, 130),
        "model.layers.1.small.weight": (5, 3),
        "model.layers.1.experts.gate_up_proj": (3, 260, 129),
    }
    plain = {"model.norm.weight": torch.randn(7).bfloat16(), "model.gate.bias": torch.randn(9)}
    numbers, scales, truth = dict(plain), {}, dict(plain)
    for name, shape in shapes.items():
        numbers[name], scales[f"{name}_scale_inv"] = in_blocks(shape)
        truth[name] = numbers[name].float() * spread(scales[f"{name}_scale_inv"], shape, (128, 128))
    return written(root, FP8, numbers, scales), truth


def gpt_oss(root: Path) -> tuple[Path, dict[str, Tensor]]:
    """Experts in 4 bits, with as many rows as columns in none of them; and their bytes."""
    torch.manual_seed(2)
    tensors = {"model.norm.weight": torch.randn(7).bfloat16()}
    for name, shape in {"gate_up_proj": (3, 48, 5, 16), "down_proj": (3, 33, 2, 16)}.items():
        tensors[f"model.layers.0.mlp.experts.{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        tensors[f"model.layers.0.mlp.experts.{name}_scales"] = torch.randint(90, 160, shape[:-1], dtype=torch.uint8)
        tensors[f"model.layers.0.mlp.experts.{name}_bias"] = torch.randn(3, shape[1]).bfloat16()
    return written(root, MXFP4, tensors), tensors
