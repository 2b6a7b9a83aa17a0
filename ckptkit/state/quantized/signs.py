"""Check cheaply, by names, dtypes and config.json keys, whether weights may be quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.layout import Spec

KEYS = ("quantization_config", "compression_config")  # sections of config.json
MLX = "quantization"  # MLX's section, which it repeats in `quantization_config`
TEXT = "text_config"  # some multimodal models have the section in here
OF_WEIGHTS = (".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale")
_BYTES = ("int8", "uint8", "int32", "uint32")  # dtypes that packed numbers are stored in


def may_be_quantized_model(specs: Mapping[str, Spec]) -> bool:
    """Return whether some of these tensors may be quantized weights or their scales."""
    return any(name.endswith(OF_WEIGHTS) for name in specs) or any(map(may_be_packed, specs.values()))


def is_declared_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json declares the weights as quantized."""
    text = config.get(TEXT)
    sections = [config, text] if isinstance(text, dict) else [config]
    return any(is_about_quantization(key, section[key]) for section in sections for key in section)


def is_about_quantization(key: str, value: object) -> bool:
    """Return whether an entry of a config.json describes the quantization of weights."""
    return key in KEYS or (key == MLX and isinstance(value, dict) and "bits" in value)


def may_be_packed(spec: Spec) -> bool:
    """Return whether a tensor's dtype is one that quantized numbers are stored in."""
    return spec.dtype.kind == "small_float" or spec.dtype.name in _BYTES
