"""Gathering: the elements of a box, wherever its chunks lie, read into one buffer. Knows bytes and offsets; no format.

The buffers that it reads through are made once and reused, so memory does not grow with what is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ckptkit.blocks import halve, row_major, span_of
from ckptkit.box import Box
from ckptkit.casting import cast
from ckptkit.checksums import crc32
from ckptkit.dtypes import DType
from ckptkit.files import Opened, read_into
from ckptkit.layout import Chunk

Array = NDArray[Any]

BLOCK_BYTES = 1 << 22  # stays in a core's cache from read through CRC to write
_SMALL_SPAN = 1 << 16  # bytes that are cheaper to read with strangers between than one by one
_RAW = {size: np.dtype(f"u{size}" if size <= 8 else f"V{size}") for size in (1, 2, 4, 8, 16)}


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a chunk that were read as they lie: `length` of them from `start`, and their CRC-32."""

    chunk: Chunk
    start: int
    length: int
    crc: int


def view_of(array: Array, part: Box, whole: Box) -> Array:
    """The elements of `part` in an array that holds those of `whole`; a view even of a single one."""
    inner = part.relative_to(whole)
    index: tuple[Any, ...] = (*(slice(a, a + n) for a, n in zip(inner.start, inner.size, strict=True)), ...)
    view: Array = array[index]
    return view


class Gatherer:
    """Reads boxes of chunks in directory `root`. Belongs to one thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = Opened(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    @cached_property
    def _scratch(self) -> memoryview:
        return memoryview(bytearray(BLOCK_BYTES))

    def fill(self, parts: Iterable[tuple[Chunk, Box]], box: Box, dtype: DType, out: memoryview) -> list[Piece]:
        """Put the elements of `box`, which `parts` tile with a box of a chunk each, into `out`: row-major, as `dtype`.

        Returns what was read in one piece.
        """
        pieces: list[Piece] = []
        for chunk, part in parts:
            here = span_of(part, box, None)
            there = span_of(part, chunk.box, chunk.strides)
            if here.is_run and there.is_run and chunk.dtype == dtype:
                target = out[here.start * dtype.itemsize : (here.start + here.length) * dtype.itemsize]
                pieces.append(self._read_elements(chunk, there.start, target))
            else:
                whole = np.frombuffer(out, _RAW[dtype.itemsize], box.numel).reshape(box.size)
                pieces.extend(self._gather(chunk, part, dtype, view_of(whole, part, box)))
        return pieces

    def read(self, chunk: Chunk, start: int, length: int) -> Piece:
        """Read bytes `start:start + length` of a chunk, at most a block, for the sake of their CRC-32."""
        return self._read_bytes(chunk, start, self._scratch[:length])

    def _gather(self, chunk: Chunk, part: Box, dtype: DType, view: Array) -> list[Piece]:
        """Fill `view` with the elements of `part`, whatever their order in the chunk and their dtype."""
        span = span_of(part, chunk.box, chunk.strides)
        nbytes = span.length * chunk.dtype.itemsize
        if span.is_run and nbytes <= BLOCK_BYTES:
            piece = self._read_elements(chunk, span.start, self._scratch[:nbytes])
            self._assign(
                np.frombuffer(self._scratch, _RAW[chunk.dtype.itemsize], part.numel).reshape(part.size),
                chunk,
                dtype,
                view,
            )
            return [piece]
        strides = row_major(chunk.box.size) if chunk.strides is None else chunk.strides
        is_dense = 2 * part.numel >= span.length
        if nbytes <= (BLOCK_BYTES if is_dense else _SMALL_SPAN):
            self._read_elements(chunk, span.start, self._scratch[:nbytes])
            steps = [stride * chunk.dtype.itemsize for stride in strides]
            values: Array = np.ndarray(part.size, _RAW[chunk.dtype.itemsize], self._scratch, 0, steps)
            self._assign(values, chunk, dtype, view)
            return []
        pieces: list[Piece] = []
        for half in halve(part, strides):
            pieces.extend(self._gather(chunk, half, dtype, view_of(view, half, part)))
        return pieces

    def _assign(self, values: Array, chunk: Chunk, dtype: DType, view: Array) -> None:
        if chunk.dtype == dtype:
            view[...] = values
            return
        converted = view.reshape(-1) if view.flags.c_contiguous else np.empty(view.size, view.dtype)
        cast(np.ascontiguousarray(values).reshape(-1), chunk.dtype, dtype, converted)
        if not view.flags.c_contiguous:
            view[...] = converted.reshape(view.shape)

    def _read_elements(self, chunk: Chunk, element: int, target: memoryview) -> Piece:
        return self._read_bytes(chunk, element * chunk.dtype.itemsize, target)

    def _read_bytes(self, chunk: Chunk, start: int, target: memoryview) -> Piece:
        read_into(self._files.fd(chunk.path), target, chunk.offset + start, self._root / chunk.path)
        return Piece(chunk, start, len(target), crc32(target))
