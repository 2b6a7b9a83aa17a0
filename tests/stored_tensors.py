"""Stored tensors in a file of numbers in memory, for tests of what only moves boxes."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np

from ckptkit.layout import Chunk, Spec, StoredTensor, axes
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DTYPES
from tests.raw import Numbers

INT32 = DTYPES["int32"]


def stored(numbers: Numbers, cuts: list[int], order: list[int]) -> tuple[StoredTensor, Numbers]:
    """A tensor in slabs of its first axis, each with its axes in `order`, in a file of numbers; and the file."""
    chunks: list[Chunk] = []
    parts: list[Numbers] = []
    at = 0
    edges = [0, *sorted({c for c in cuts if c < len(numbers)} - {0}), len(numbers)]
    for a, b in pairwise(edges):
        part = numbers[a:b]
        size = tuple(part.shape)
        permuted = part.transpose(order)
        steps = [prod(permuted.shape[d + 1 :]) for d in range(part.ndim)]
        strides = tuple(steps[order.index(axis)] for axis in range(part.ndim))
        box = Box((a, *(0 for _ in size[1:])), size)
        chunks.append(
            Chunk(
                box, "f", 4 * at, 4 * part.size, INT32, axes.strides_unless_row_major(strides, size), crc32=len(chunks)
            )
        )
        parts.append(permuted.reshape(-1))
        at += part.size
    file = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return StoredTensor(Spec(INT32, tuple(numbers.shape)), tuple(chunks)), file


def contents(tensor: StoredTensor, file: Numbers) -> Numbers:
    """The elements of a tensor, which its chunks must tile."""
    found = np.full(tensor.shape_tiled_by_chunks, -1, np.int32)
    for chunk in tensor.chunks:
        index = tuple(slice(a, b) for a, b in zip(chunk.start, chunk.box.stop, strict=True))
        assert (found[index] == -1).all()
        assert chunk.offset % 4 == 0
        steps = [4 * step for step in axes.strides_of_chunk(chunk)]
        raw = file[chunk.offset // 4 : (chunk.offset + chunk.length) // 4]
        found[index] = np.ndarray(chunk.size, np.int32, raw.tobytes(), 0, steps) if chunk.box.numel else 0
        run_start, run_length = chunk.checksummed_range
        assert run_start <= chunk.offset
        assert chunk.offset + chunk.length <= run_start + run_length
    return found.reshape(tensor.spec.shape)
