"""Access torch tensors as bytes, for blocks to read into them or to write from them."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.errors import Unsupported
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DTYPES, DType

# Copy every dtype as a plain dtype of its size: torch cannot copy, slice and view all dtypes.
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def require_known_dtype(dtype: torch.dtype, name: str) -> DType:
    """Return ckptkit's dtype for a torch dtype. Raises `Unsupported`, for tensor `name`, if there is none."""
    known = DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise Unsupported(f"ckptkit cannot store dtype {dtype}", tensor=name)
    return known


def require_own_memory_per_element(tensor: Tensor, name: str) -> None:
    """Raise `Unsupported`, for tensor `name`, unless each element of a tensor has its own bytes in memory."""
    if tensor.layout != torch.strided:
        message, hint = (
            f"cannot load into a tensor of layout {tensor.layout}",
            "load into a dense tensor, and convert it",
        )
    elif tensor.is_conj() or tensor.is_neg():
        message, hint = "cannot load into a conjugate or negative view", "pass `tensor.resolve_conj().resolve_neg()`"
    elif tensor.numel() > 1 and any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        message, hint = "cannot load into an expanded tensor, whose elements share memory", "pass `tensor.clone()`"
    else:
        return
    raise Unsupported(message, tensor=name, hint=hint)


class Buffers(dict[torch.device, Tensor]):
    """A buffer of one block on the CPU for each device, created on first use, for copies to or from its tensors."""

    def __missing__(self, device: torch.device) -> Tensor:
        self[device] = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self[device]


def memory_of_tensor(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def is_row_major_on_cpu(tensor: Tensor) -> bool:
    """Return whether the elements are row-major in CPU memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def view_of_box(tensor: Tensor, box: Box) -> Tensor:
    """Return the elements of a box of a tensor, as a view in a plain dtype of the same size."""
    index = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
    return tensor.detach().view(_PLAIN[tensor.itemsize])[index]


def read_row_major(view: Tensor, buffer: Tensor) -> memoryview:
    """Return the elements of a view in row-major order: its own memory if possible, else a copy in `buffer`."""
    if is_row_major_on_cpu(view):
        return memory_of_tensor(view)
    copied = buffer[: view.nbytes].view(view.dtype).view(view.shape)
    copied.copy_(view)
    return memory_of_tensor(copied)
