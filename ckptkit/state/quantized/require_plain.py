"""Refuse quantized weights where names or rows are about to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptError, Unsupported
from ckptkit.layout import StoredTensor
from ckptkit.models.names.weights import Weights
from ckptkit.state.quantized.find import find_quantized


def require_plain(found: Weights, config: Mapping[str, Any] | None) -> None:
    """Raise `Unsupported` for quantized weights, whose rows cannot be moved without their scales."""
    try:
        quantized = find_quantized(found.layout, config)
    except CkptError as error:
        raise error.blame(path=found.layout.root) from None
    lost = next((name for name, tensor in found.layout.tensors.items() if is_without_bytes(tensor)), None)
    if quantized is not None or lost is not None:
        method = f" ({quantized.method})" if quantized else ""
        message = f"the weights are quantized{method}: other names or rows would separate them from their scales"
        hint = "dequantize them first: ckptkit consolidate SRC OUT --names keep --dtype bf16"
        raise Unsupported(message, path=found.layout.root, hint=hint)


def is_without_bytes(tensor: StoredTensor) -> bool:
    """Return whether a tensor is yet to be computed, of others."""
    return not tensor.chunks and tensor.spec.numel > 0
