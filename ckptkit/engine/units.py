"""Units: a plan cut into blocks of bounded size, and these into units that workers share. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from ckptkit.engine.gather import BLOCK_BYTES
from ckptkit.layout import Chunk
from ckptkit.plan import Plan, Target
from ckptkit.tensors.blocks import cut, span_of
from ckptkit.tensors.box import Box, BoxIndex

UNIT_BYTES = 1 << 28  # at most so much is done again after an interruption


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a target, made at once: a box of it, and what it is made of: source chunks with the boxes shared."""

    target: Target
    box: Box
    parts: tuple[tuple[Chunk, Box], ...]

    @property
    def start(self) -> int:
        """Its first byte, counted from the start of the target's chunk."""
        return span_of(self.box, self.target.chunk.box, None).start * self.target.chunk.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Its bytes in the destination."""
        return self.box.numel * self.target.chunk.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a plan that worker `number` of `count` does: a run of its units, as equal as they can be."""

    number: int = 0
    count: int = 1

    def unit_bytes(self, plan: Plan) -> int:
        """Bytes of the destination in a unit: few enough that there are some for each worker."""
        return max(BLOCK_BYTES, min(UNIT_BYTES, -(-plan.nbytes // (4 * self.count))))

    def has(self, unit: int, plan: Plan) -> bool:
        """True if the unit is in this share."""
        units = -(-plan.nbytes // self.unit_bytes(plan))
        return unit * self.count // units == self.number


WHOLE = Share()


def blocks(plan: Plan) -> Iterator[Block]:
    """The plan cut into blocks of bounded size, in destination order."""
    for target in plan.targets:
        yield from blocks_of(target)


def blocks_of(target: Target) -> Iterator[Block]:
    """A target cut into blocks, in the order of its bytes."""
    itemsize = max(target.chunk.dtype.itemsize, *(copy.src.dtype.itemsize for copy in target.copies))
    index = BoxIndex([copy.region for copy in target.copies])
    for box in cut(target.chunk.box, BLOCK_BYTES // itemsize):
        yield Block(target, box, tuple((target.copies[i].src, shared) for i, shared in index.meeting(box)))


def units_of(plan: Plan, nbytes: int) -> Iterator[tuple[int, Iterator[Block]]]:
    """The blocks in units of `nbytes` of the destination, and the number of each; not by file, nor by target."""
    ends = accumulate(target.chunk.length for target in plan.targets)
    placed = (
        (end - target.chunk.length + block.start, block)
        for target, end in zip(plan.targets, ends, strict=True)
        for block in blocks_of(target)
    )
    for unit, group in groupby(placed, lambda pair: pair[0] // nbytes):
        yield unit, (block for _, block in group)
