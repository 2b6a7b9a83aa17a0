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
    LOADED.pop(model, None)
    sums = {}
    for name, tensor in weights:
        sums[name] = crc32_of_tensor(tensor)
        yield name, tensor
    LOADED[model] = LoadedWeights(layout, sums)


def crc32_of_tensor(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the elements of a CPU tensor in row-major order."""
    import torch

    return crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
