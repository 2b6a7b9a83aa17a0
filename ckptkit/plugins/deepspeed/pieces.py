"""Cut flattened tensors into what each rank has of them, as ZeRO does. Integers and boxes; opens no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.layout.axes import boxes_of_run
from ckptkit.layout.box import Shape


class RankRun(NamedTuple):
    """The elements of a flattened tensor that a rank has: `numel` from `at`, and where they begin in its buffer."""

    rank: int
    start: int
    at: int
    numel: int


def runs_in_row(first: int, numel: int, size: int, ranks: int) -> Iterator[RankRun]:
    """Yield the runs of `numel` elements from `first` of the row that the ranks' buffers of `size` elements make up.

    So ZeRO 1 and 2 cut: tensors follow one another, and the ranks' buffers do. The last may be of another size.
    """
    at = 0
    while at < numel:
        rank = min((first + at) // size, ranks - 1) if size else ranks - 1
        start = first + at - rank * size
        count = numel - at if rank == ranks - 1 else min(size - start, numel - at)
        yield RankRun(rank, start, at, count)
        at += count


def runs_of_each(first: int, numel: int, ranks: int) -> Iterator[RankRun]:
    """Yield the runs of a tensor of which each rank has as much, from `first` of its buffer; the last have less.

    So ZeRO 3 cuts: each tensor by itself, with padding behind it.
    """
    size = share_of(numel, ranks)
    for rank in range(ranks):
        count = min(size, numel - rank * size)
        if count <= 0:
            return
        yield RankRun(rank, first, rank * size, count)


def share_of(numel: int, ranks: int) -> int:
    """Return the elements, padding among them, that each rank has of a tensor that is cut by itself."""
    return -(-numel // ranks)


def join(shape: Shape, runs: Iterable[RankRun], buffers: Sequence[Chunk]) -> StoredTensor:
    """Return the tensor that lies in runs of the ranks' buffers, each of one axis."""
    chunks = (boxes_of_run(buffers[run.rank], run.start, shape, run.at, run.at + run.numel) for run in runs)
    return StoredTensor(Spec(buffers[0].dtype, shape), tuple(chain.from_iterable(chunks)))
