"""Choose the dtypes to compute and to reduce in. Shards and optimizer state are fp32, and buffers are never cast."""

from __future__ import annotations

import torch

from ckptkit.training.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def param_dtype(config: TrainConfig, device_type: str) -> torch.dtype:
    """Return the dtype of gathered parameters and activations."""
    if config.param_dtype != "auto":
        return DTYPES[config.param_dtype]
    return torch.bfloat16 if device_type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
