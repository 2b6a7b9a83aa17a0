"""Tensors in files of no format: chunks at any offset and in any order, written and read by numpy alone."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, row_major_strides
from ckptkit.layout.dtypes import DType
from tests.strategies import cells

Numbers = NDArray[np.generic]


class Files:
    """Files in a directory, to which chunks are appended at whatever offset comes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def put(
        self, numbers: Numbers, box: Box, dtype: DType, *, order: list[int] | None = None, file: str = "f"
    ) -> Chunk:
        """Store a box of a tensor, its axes from slowest to fastest in `order`, with its CRC-32."""
        axes = list(range(numbers.ndim)) if order is None else order
        raw = np.ascontiguousarray(numbers[cells(box)].transpose(axes)).tobytes()
        steps = row_major_strides(tuple(box.size[axis] for axis in axes))
        strides = None if order is None else tuple(steps[axes.index(axis)] for axis in range(numbers.ndim))
        offset = self.append(file, b"?" * (1 + len(raw) % 3) + raw) - len(raw)
        return Chunk(box, file, offset, len(raw), dtype, strides, zlib.crc32(raw))

    def append(self, file: str, raw: bytes) -> int:
        """Where a file ends after `raw` has been added to it."""
        with (self.root / file).open("ab") as stream:
            stream.write(raw)
            return stream.tell()

    def layout(self, **tensors: StoredTensor) -> Layout:
        """The layout of some of what was put here."""
        return Layout(self.root, "raw", tensors)


def allocated(root: Path, spec: Spec, boxes: list[Box]) -> Layout:
    """A tensor `t` still to be written: its chunks one after another in two files full of 0xEE."""
    files, chunks = Files(root), []
    for i, box in enumerate(boxes):
        nbytes = box.numel * spec.dtype.itemsize
        end = files.append(f"f{i % 2}", b"\xee" * nbytes)
        chunks.append(Chunk(box, f"f{i % 2}", end - nbytes, nbytes, spec.dtype))
    return files.layout(t=StoredTensor(spec, tuple(chunks)))


def contents(layout: Layout, name: str = "t") -> bytes:
    """The bytes of a tensor in row-major order, put together element by element from its chunks."""
    tensor = layout.tensors[name]
    numbers = np.zeros(tensor.spec.shape, f"V{tensor.spec.dtype.itemsize}")
    for chunk in tensor.chunks:
        if chunk.box.numel:
            raw = (layout.root / chunk.path).read_bytes()[chunk.offset : chunk.offset + chunk.length]
            assert len(raw) == chunk.length
            numbers[cells(chunk.box)] = unpack(chunk, raw)
    return numbers.tobytes()


def unpack(chunk: Chunk, raw: bytes) -> Numbers:
    """A chunk's elements in their order, whatever its strides."""
    itemsize = chunk.dtype.itemsize
    strides = row_major_strides(chunk.box.size) if chunk.strides is None else chunk.strides
    elements = np.frombuffer(raw, f"V{itemsize}")
    return as_strided(elements, chunk.box.size, [step * itemsize for step in strides])
