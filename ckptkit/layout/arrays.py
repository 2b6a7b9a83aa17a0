"""Create numpy arrays and torch tensors from stored elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape
from ckptkit.layout.casting import widener
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.small_floats import SMALL_FLOATS

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


def to_numpy(data: memoryview, dtype: DType, shape: Shape) -> Array:
    """Return the elements in `data` as an array, which shares its memory if numpy has the dtype.

    Other dtypes become the next larger dtype that represents every value: float32 for bfloat16 and 8-bit floats,
    complex64 for complex32. Raises `Unsupported` for dtypes with two numbers per element, and for quantized dtypes
    without scales.
    """
    if dtype.name == "bfloat16":
        return _widened(data, "bfloat16").reshape(shape)
    if dtype.name == "complex32":
        return _widened(data, "float16").view(np.complex64).reshape(shape)
    if dtype.name.endswith("_x2") or dtype.kind == "quantized":
        raise Unsupported(f"numpy does not have dtype {dtype}", hint="`.torch()` knows some that numpy does not")
    if dtype.kind == "small_float":
        numbers = np.array(SMALL_FLOATS[dtype.name].value_by_bits, np.float32)
        return numbers[np.frombuffer(data, np.uint8)].reshape(shape)
    return np.ndarray(shape, dtype.name, data)


def _widened(data: memoryview, name: str) -> Array:
    return widener(DTYPES[name])(np.frombuffer(data, np.uint16))


def to_torch(data: memoryview, dtype: DType, shape: Shape) -> torch.Tensor:
    """Return `data` as a CPU tensor, which shares its memory. Raises `Unsupported` if quantized: scales are missing."""
    import torch

    if dtype.kind == "quantized":
        raise Unsupported(f"cannot read {dtype} without its scales")
    torch_dtype = getattr(torch, dtype.name)
    if not data:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype).reshape(shape)
