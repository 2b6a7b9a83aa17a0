"""Precision: in which dtype a rank computes and reduces. Shards and optimizer are fp32, and buffers are never cast."""

from __future__ import annotations

import torch

from ckptkit.train.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def param_dtype(config: TrainConfig, device_type: str) -> torch.dtype:
    """The dtype that gathered parameters and activations have."""
    if config.param_dtype != "auto":
        return DTYPES[config.param_dtype]
    return torch.bfloat16 if device_type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def reduce_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype that gradients are reduced in."""
    return DTYPES[config.reduce_dtype]
