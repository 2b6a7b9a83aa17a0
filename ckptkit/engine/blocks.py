"""Cut the targets of a plan into blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.engine.gather import BLOCK_BYTES
from ckptkit.layout import Chunk
from ckptkit.layout.blocks import cut, cut_rows
from ckptkit.layout.box import Box, BoxIndex
from ckptkit.layout.plan import ByRows, Copy, Plan, Region, Target, same

Parts = tuple[tuple[Chunk, Box], ...]  # chunks of a source, each with the box that it shares with an input


class Input(NamedTuple):
    """A box of a tensor of the source of this number, and the parts of its chunks that tile it."""

    source: int
    box: Box
    parts: Parts


class Block(NamedTuple):
    """A run of a target's chunk, made at once: a box of it, and the inputs that it is made of.

    It begins at byte `start` of the chunk.
    """

    target: Target
    box: Box
    start: int
    inputs: tuple[Input, ...]

    @property
    def nbytes(self) -> int:
        """Return its bytes in the destination."""
        return self.box.numel * self.target.chunk.dtype.itemsize


class Wanted(NamedTuple):
    """One of the inputs of all blocks of a target: the source, the box of it that a block needs, and what has that."""

    source: int
    region: Region
    copies: tuple[Copy, ...]
    boxes: BoxIndex

    def of(self, box: Box) -> Input:
        region = self.region(box)
        return Input(self.source, region, tuple((self.copies[i].src, part) for i, part in self.boxes.meeting(region)))


def blocks(plan: Plan) -> Iterator[Block]:
    """Yield the blocks of a plan in the order of its targets, each of at most `BLOCK_BYTES`."""
    for target in plan.targets:
        yield from blocks_of(plan, target)


def blocks_of(plan: Plan, target: Target, itemsize: int = 0) -> Iterator[Block]:
    """Yield the blocks of one target in the order of its bytes, small enough for elements of `itemsize` bytes too."""
    wanted = wanted_of(target, len(plan.sources))
    recipe, whole = target.recipe, target.chunk.box
    if recipe is not None and isinstance(recipe, ByRows):  # to ask a protocol takes 25 microseconds; copies have none
        boxes = cut_rows(whole, recipe.rows)
    else:
        boxes = cut(whole, BLOCK_BYTES // max(itemsize, width(target)))
    start = 0
    for box in boxes:
        block = Block(target, box, start, tuple(one.of(box) for one in wanted))
        yield block
        start += block.nbytes


def wanted_of(target: Target, sources: int) -> list[Wanted]:
    """Return the inputs of the blocks of a target: the operands of its recipe, or its own box in each source."""
    if target.recipe is None:
        groups = [target.copies] if sources == 1 else split(target.copies, sources)
        return [wanted(copies[0].source, same, copies) for copies in groups if copies]
    operands = target.recipe.operands
    pairs = zip(operands, split(target.copies, len(operands)), strict=True)
    return [wanted(operand.source, operand.region, copies) for operand, copies in pairs]


def wanted(source: int, region: Region, copies: tuple[Copy, ...]) -> Wanted:
    return Wanted(source, region, copies, BoxIndex([copy.region for copy in copies]))


def split(copies: tuple[Copy, ...], count: int) -> list[tuple[Copy, ...]]:
    return [tuple(copy for copy in copies if copy.operand == number) for number in range(count)]


def width(target: Target) -> int:
    """Return the bytes that an element of a target takes at most while it is made."""
    dtypes = [target.chunk.dtype, *(copy.src.dtype for copy in target.copies)]
    if target.recipe is not None:
        dtypes += [operand.dtype for operand in target.recipe.operands]
    return max(dtype.itemsize for dtype in dtypes)
