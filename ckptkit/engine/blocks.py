"""Cut the targets of a plan into blocks of bounded size. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.engine.gather import BLOCK_BYTES
from ckptkit.layout import Chunk
from ckptkit.plan import Copy, Plan, Target
from ckptkit.tensors.blocks import cut, span_of
from ckptkit.tensors.box import Box, BoxIndex

Parts = tuple[tuple[Chunk, Box], ...]  # chunks of a source, each with the box that it shares with a block

_WORKING = 4  # times the bytes of its elements that a combination has at hand, in a core's cache


class Block(NamedTuple):
    """A run of a target's chunk, made at once: a box of it, and the parts of each source that it is made of."""

    target: Target
    box: Box
    parts: tuple[Parts, ...]

    @property
    def start(self) -> int:
        """Return its first byte, counted from the start of the target's chunk."""
        return span_of(self.box, self.target.chunk.box, None).start * self.target.chunk.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return its bytes in the destination."""
        return self.box.numel * self.target.chunk.dtype.itemsize


def blocks(plan: Plan) -> Iterator[Block]:
    """Yield the blocks of a plan in the order of its targets, each of at most `BLOCK_BYTES`."""
    for target in plan.targets:
        yield from blocks_of(plan, target)


def blocks_of(plan: Plan, target: Target, itemsize: int = 0) -> Iterator[Block]:
    """Yield the blocks of one target in the order of its bytes, small enough for elements of `itemsize` bytes too."""
    by_source = [target.copies] if not plan.others else split(target.copies, len(plan.sources))
    indices = [(copies, BoxIndex([copy.region for copy in copies])) for copies in by_source]
    for box in cut(target.chunk.box, BLOCK_BYTES // max(itemsize, width(plan, target))):
        parts = (tuple((copies[i].src, shared) for i, shared in index.meeting(box)) for copies, index in indices)
        yield Block(target, box, tuple(parts))


def split(copies: tuple[Copy, ...], count: int) -> list[tuple[Copy, ...]]:
    """Return the copies from each of `count` sources."""
    return [tuple(copy for copy in copies if copy.source == number) for number in range(count)]


def width(plan: Plan, target: Target) -> int:
    """Return the bytes that an element of a target takes at most while it is made."""
    dtype = target.chunk.dtype
    stored = max(dtype.itemsize, *(copy.src.dtype.itemsize for copy in target.copies))
    if plan.combination is None:
        return stored
    return _WORKING * max(stored, plan.combination.reads_as(dtype).itemsize)
