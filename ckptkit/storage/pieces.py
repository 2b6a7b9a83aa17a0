"""Write a rank's shard of a tensor to its position in the final files. The files must exist."""

from __future__ import annotations

from math import prod
from operator import mul

import torch
from torch import Tensor

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.io.crc32 import part_sum
from ckptkit.io.file import OpenFiles
from ckptkit.layout import Chunk, FileOffset, StoredTensor
from ckptkit.layout.box import Box, BoxIndex, cut_box, row_major
from ckptkit.storage.memory import make_buffer, part_of, take


class PieceWriter:
    """Writes shards of tensors into open `files`. Uses at most one block of memory per device."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._buffers: dict[torch.device, Tensor] = {}

    def write(self, tensor: Tensor, box: Box, target: StoredTensor) -> dict[FileOffset, int]:
        """Write a tensor, which is box `box` of the target. Returns its contribution to the checksum of each chunk."""
        if tensor.device not in self._buffers:
            self._buffers[tensor.device] = make_buffer(tensor.device)
        meetings = BoxIndex([chunk.box for chunk in target.chunks]).meeting(box)
        shares = [(target.chunks[i], shared) for i, shared in meetings]
        return {(chunk.path, chunk.offset): self._write(tensor, box, chunk, shared) for chunk, shared in shares}

    def _write(self, tensor: Tensor, box: Box, chunk: Chunk, shared: Box) -> int:
        """Write the elements of `shared` into a chunk. Returns their contribution to the chunk's checksum."""
        file = self._files[chunk.path]
        itemsize = chunk.dtype.itemsize
        total = 0
        for block in cut_box(shared, BLOCK_BYTES // itemsize):
            data = take(part_of(tensor, block.relative_to(box)), self._buffers[tensor.device])
            starts, length = runs_of(block, chunk.box)
            nbytes = length * itemsize
            for i, start in enumerate(starts):
                span, at = data[i * nbytes : (i + 1) * nbytes], start * itemsize
                file.write_at(span, chunk.offset + at)
                total ^= part_sum(span, chunk.length - at - nbytes)
        return total


def runs_of(box: Box, chunk: Box) -> tuple[list[int], int]:
    """Return where the contiguous ranges of a box start in the memory of a chunk, in row-major order, and their length.

    All in elements. A box of full rows is a single range; a box of some columns has a range per row.
    """
    inner, steps = box.relative_to(chunk), row_major(chunk.size)
    axis = next((d for d in range(len(steps)) if box.size[d + 1 :] == chunk.size[d + 1 :]), 0)
    starts = [sum(map(mul, inner.start, steps))]
    for size, step in zip(box.size[:axis], steps[:axis], strict=True):
        starts = [start + i * step for start in starts for i in range(size)]
    return starts, prod(box.size[axis:])
