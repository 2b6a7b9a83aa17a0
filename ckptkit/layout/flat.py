"""Cut a tensor out of a flat one that ranks have in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from ckptkit.layout import Chunk
from ckptkit.layout.axes import boxes_of_run
from ckptkit.layout.box import Shape


class FlatPiece(NamedTuple):
    """The elements `begin:end` of a flat tensor: the first ones of a chunk with one axis."""

    begin: int
    end: int
    chunk: Chunk


def pieces_in_turn(chunks: Iterable[tuple[Chunk, int]]) -> Iterator[FlatPiece]:
    """Yield the pieces that follow one another; of each chunk the first so many elements, without padding."""
    begin = 0
    for chunk, numel in chunks:
        yield FlatPiece(begin, begin + numel, chunk)
        begin += numel


def cut_out(pieces: Iterable[FlatPiece], start: int, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a tensor of `shape`, which begins at element `start` of a flat one.

    Raises `Corrupt` for a chunk that has more than one axis.
    """
    stop = start + prod(shape)
    for begin, end, chunk in pieces:
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield from boxes_of_run(chunk, low - begin, shape, low - start, high - start)
