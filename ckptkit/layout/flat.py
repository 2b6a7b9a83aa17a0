"""Cut a tensor out of a flat tensor that ranks have in shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from ckptkit.layout import Chunk
from ckptkit.layout.axes import boxes_of_run
from ckptkit.layout.box import Shape


class FlatPiece(NamedTuple):
    """The elements `begin:end` of a flat tensor: the first elements of a chunk with one axis."""

    begin: int
    end: int
    chunk: Chunk


def pieces_in_turn(chunks: Iterable[tuple[Chunk, int]]) -> Iterator[FlatPiece]:
    """Yield consecutive pieces: the first elements of each chunk, as many as its count says, without padding."""
    begin = 0
    for chunk, numel in chunks:
        yield FlatPiece(begin, begin + numel, chunk)
        begin += numel


def cut_out(pieces: Iterable[FlatPiece], start: int, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a tensor of `shape` that begins at element `start` of a flat tensor.

    Raises `Corrupt` for a chunk with more than one axis.
    """
    stop = start + prod(shape)
    for begin, end, chunk in pieces:
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield from boxes_of_run(chunk, low - begin, shape, low - start, high - start)
