"""Tell at a glance whether weights may be quantized, by names and dtypes alone; few are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.layout import Spec

KEYS = ("quantization_config", "compression_config")  # of config.json
MLX = "quantization"  # where MLX says it, once more in `quantization_config`
TEXT = "text_config"  # where some models with images say it
OF_WEIGHTS = (".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale")
_BYTES = ("int8", "uint8", "int32", "uint32")  # what packed numbers are stored as


def may_be_quantized(specs: Mapping[str, Spec]) -> bool:
    """Return whether some of these tensors may be quantized weights, or the scales of such."""
    return any(name.endswith(OF_WEIGHTS) for name in specs) or any(map(may_be_packed, specs.values()))


def may_hold_quantized(specs: Mapping[str, Spec], config: Mapping[str, Any]) -> bool:
    """Return whether some of these tensors may be quantized, or config.json says that the model is."""
    return is_declared_quantized(config) or may_be_quantized(specs)


def is_declared_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that the weights are quantized."""
    text = config.get(TEXT)
    sections = [config, text] if isinstance(text, dict) else [config]
    return any(is_about_quantization(key, section[key]) for section in sections for key in section)


def is_about_quantization(key: str, value: object) -> bool:
    """Return whether an entry of a config.json says how weights are quantized."""
    return key in KEYS or (key == MLX and isinstance(value, dict) and "bits" in value)


def may_be_packed(spec: Spec) -> bool:
    """Return whether a tensor may hold the numbers of quantized weights, by its dtype."""
    return spec.dtype.kind == "small_float" or spec.dtype.name in _BYTES
