"""Rearrange elements from the stored order and dtype to the requested ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.engine.casting import cast_into
from ckptkit.layout import Chunk, ReadRun
from ckptkit.layout.box import Box, halve_box, row_major_strides, span_of
from ckptkit.layout.dtypes import DType

Array = NDArray[Any]
Read = Callable[[Chunk, int, memoryview], ReadRun]  # fills a buffer with the bytes of a chunk from the given offset on

_SMALL_SPAN = 1 << 16  # bytes: a span this short is read at once, even if most of it is not needed
_RAW = {size: np.dtype(f"u{size}" if size <= 8 else f"V{size}") for size in (1, 2, 4, 8, 16)}


def read_rearranged(
    read: Read, scratch: memoryview, chunk: Chunk, part: Box, dtype: DType, box: Box, out: memoryview
) -> Iterator[ReadRun]:
    """Write the elements of `part` of a chunk, as `dtype`, to their places in `out`, of `box`.

    Reads them through the buffer `scratch`, in as few reads as their order in the chunk allows. Yields the ranges that
    were read contiguously.
    """
    itemsize = chunk.dtype.itemsize
    strides = row_major_strides(chunk.size) if chunk.strides is None else chunk.strides
    whole = np.frombuffer(out, _RAW[dtype.itemsize], box.numel).reshape(box.size)
    remaining = [(part, view_of_region(whole, part, box))]  # a recursive closure would keep the files open
    while remaining:
        part, view = remaining.pop()
        span = span_of(part, chunk.box, chunk.strides)
        is_dense = 2 * part.numel >= span.length
        if span.length * itemsize > (len(scratch) if is_dense else _SMALL_SPAN):
            halves = [(half, view_of_region(view, half, part)) for half in halve_box(part, strides)]
            remaining += reversed(halves)
            continue
        target = scratch[: span.length * itemsize]
        piece = read(chunk, span.start * itemsize, target)
        values = np.ndarray(part.size, _RAW[itemsize], target, 0, [stride * itemsize for stride in strides])
        if chunk.dtype == dtype:
            view[...] = values
        else:
            is_flat = view.flags.c_contiguous
            converted = view.reshape(-1) if is_flat else np.empty(view.size, view.dtype)
            cast_into(np.ascontiguousarray(values).reshape(-1), chunk.dtype, dtype, converted)
            if not is_flat:
                view[...] = converted.reshape(view.shape)
        if span.length == part.numel:  # no byte of the span was skipped, so its CRC-32 counts
            yield piece


def view_of_region(array: Array, part: Box, whole: Box) -> Array:
    """Return a view of the elements of `part` in an array that has the elements of `whole`; of a single element too."""
    inner = part.relative_to(whole)
    index: tuple[Any, ...] = (*(slice(a, a + n) for a, n in zip(inner.start, inner.size, strict=True)), ...)
    view: Array = array[index]
    return view
