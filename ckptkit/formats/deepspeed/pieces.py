"""Cut flattened tensors into what each rank has of them, as ZeRO does. Integers and boxes; opens no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.tensors.box import Box, Shape
from ckptkit.tensors.flat_ranges import boxes_of_range


class Run(NamedTuple):
    """The elements of a flattened tensor that a rank has: `numel` from `at`, and where they begin in its buffer."""

    rank: int
    start: int
    at: int
    numel: int


def runs_in_row(first: int, numel: int, size: int, ranks: int) -> Iterator[Run]:
    """Yield the runs of `numel` elements from `first` of the row that the ranks' buffers of `size` elements make up.

    So ZeRO 1 and 2 cut: tensors follow one another, and the ranks' buffers do. The last may be of another size.
    """
    at = 0
    while at < numel:
        rank = min((first + at) // size, ranks - 1) if size else ranks - 1
        start = first + at - rank * size
        count = numel - at if rank == ranks - 1 else min(size - start, numel - at)
        yield Run(rank, start, at, count)
        at += count


def runs_of_each(first: int, numel: int, ranks: int) -> Iterator[Run]:
    """Yield the runs of a tensor of which each rank has as much, from `first` of its buffer; the last have less.

    So ZeRO 3 cuts: each tensor by itself, with padding behind it.
    """
    size = share_of(numel, ranks)
    for rank in range(ranks):
        count = min(size, numel - rank * size)
        if count <= 0:
            return
        yield Run(rank, first, rank * size, count)


def share_of(numel: int, ranks: int) -> int:
    """Return the elements, padding among them, that each rank has of a tensor that is cut by itself."""
    return -(-numel // ranks)


def join(shape: Shape, runs: Iterable[Run], buffers: Sequence[Chunk]) -> StoredTensor:
    """Return the tensor that lies in runs of the ranks' buffers, each of one axis."""
    spec = Spec(buffers[0].dtype, shape)
    itemsize = spec.dtype.itemsize
    chunks = tuple(
        part_of(buffers[run.rank], box, (run.start + begin) * itemsize)
        for run in runs
        for box, begin in boxes_of_range(shape, run.at, run.at + run.numel)
    )
    return StoredTensor(spec, chunks)


def part_of(buffer: Chunk, box: Box, start: int) -> Chunk:
    """Return the chunk with a box of a tensor, from byte `start` of a buffer, by which it is checked."""
    length = box.numel * buffer.dtype.itemsize
    place = (buffer.path, buffer.offset + start, length)
    return Chunk(box, *place, buffer.dtype, crc32=buffer.crc32, run=buffer.bytes)
