"""Record which weights a model in an inference engine has: their names, dtypes, shapes and CRC-32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ckptkit.io.crc32 import crc32
from ckptkit.layout import Layout

if TYPE_CHECKING:
    import torch

LOADED: WeakKeyDictionary[Any, LoadedWeights] = WeakKeyDictionary()  # by model


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The layout that weights were loaded from, and the CRC-32 of each tensor in the model, in row-major order."""

    layout: Layout
    sums: dict[str, int]


def record_loaded_weights(
    model: Any, layout: Layout, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights of a layout unchanged, and after the last record them as the weights of `model`."""
    import torch

    LOADED.pop(model, None)
    sums = {}
    for name, tensor in weights:
        flat = tensor.contiguous().reshape(-1)
        sums[name] = crc32(flat.view(torch.uint8).numpy().data) if tensor.numel() else 0
        yield name, tensor
    LOADED[model] = LoadedWeights(layout, sums)
