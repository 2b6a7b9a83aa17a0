"""Rearrange elements from the stored order and dtype to the requested ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.layout import Chunk, ReadRun
from ckptkit.layout.box import Box, halve_box, row_major_strides, span_of
from ckptkit.layout.casting import cast_into
from ckptkit.layout.dtypes import DType

Array = NDArray[Any]
Read = Callable[[Chunk, int, memoryview], ReadRun]  # fills a buffer with the bytes of a chunk from the given offset on

_SMALL_SPAN = 1 << 16  # bytes: a span this short is read at once, even if most of it is not needed
_RAW = {size: np.dtype(f"u{size}" if size <= 8 else f"V{size}") for size in (1, 2, 4, 8, 16)}


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Reads a chunk through a scratch buffer, and converts its elements to `dtype`."""

    read: Read
    scratch: memoryview
    chunk: Chunk
    dtype: DType

    def read_region_into(self, part: Box, box: Box, out: memoryview) -> Iterator[ReadRun]:
        """Write the elements of `part` to their places in `out`, of `box`. Yields the ranges read contiguously."""
        whole = np.frombuffer(out, _RAW[self.dtype.itemsize], box.numel).reshape(box.size)
        yield from self._fill_view(part, view_of_region(whole, part, box))

    def _fill_view(self, part: Box, view: Array) -> Iterator[ReadRun]:
        """Fill `view` with the elements of `part`, in as few reads as their order in the chunk allows."""
        chunk, itemsize = self.chunk, self.chunk.dtype.itemsize
        span = span_of(part, chunk.box, chunk.strides)
        strides = row_major_strides(chunk.size) if chunk.strides is None else chunk.strides
        is_dense = 2 * part.numel >= span.length
        if span.length * itemsize <= (len(self.scratch) if is_dense else _SMALL_SPAN):
            target = self.scratch[: span.length * itemsize]
            piece = self.read(chunk, span.start * itemsize, target)
            steps = [stride * itemsize for stride in strides]
            values = np.ndarray(part.size, _RAW[itemsize], target, 0, steps)
            if chunk.dtype == self.dtype:
                view[...] = values
            else:
                is_flat = view.flags.c_contiguous
                converted = view.reshape(-1) if is_flat else np.empty(view.size, view.dtype)
                cast_into(np.ascontiguousarray(values).reshape(-1), chunk.dtype, self.dtype, converted)
                if not is_flat:
                    view[...] = converted.reshape(view.shape)
            if span.length == part.numel:  # no byte of the span was skipped, so its CRC-32 counts
                yield piece
            return
        for half in halve_box(part, strides):
            yield from self._fill_view(half, view_of_region(view, half, part))


def view_of_region(array: Array, part: Box, whole: Box) -> Array:
    """Return a view of the elements of `part` in an array that has the elements of `whole`; of a single element too."""
    inner = part.relative_to(whole)
    index: tuple[Any, ...] = (*(slice(a, a + n) for a, n in zip(inner.start, inner.size, strict=True)), ...)
    view: Array = array[index]
    return view
