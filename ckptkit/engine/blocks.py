"""Cut the targets of a plan into blocks of bounded size, and gather the elements of a box from its chunks.

Several processes share a plan unit by unit; a unit consists of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, ReadRun
from ckptkit.layout.box import Box, BoxIndex, cut_box, cut_rows, span_of
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import ByRows, Copy, Plan, Region, Target, identity_region

# Gather the elements of a box from its chunks into one buffer.
#
# Elements that have the same order and dtype in the source and in the buffer are read straight into the buffer. Other
# elements go through a second buffer and numpy, which is imported only then.
BLOCK_BYTES = 1 << 22
STEP_BYTES = 1 << 19  # per read of a local file: small enough to stay in a core's cache for the checksum and the write


class Gatherer:
    """Reads boxes of chunks from the files in directory `root`. Use one gatherer per thread.

    It computes the CRC-32 of its reads from the chunks for which `sums` returns True.
    """

    def __init__(self, root: Path, sums: Callable[[Chunk], bool] = lambda _: False) -> None:
        self._sums = sums
        self.step = BLOCK_BYTES if is_remote(root) else STEP_BYTES
        self.files = OpenFiles(root, in_order=True)

    def close(self) -> None:
        self.files.close()

    @cached_property
    def scratch(self) -> memoryview:
        """Return a buffer of one block, for elements that must be reordered or cast."""
        return memoryview(bytearray(BLOCK_BYTES))

    def gather_box(
        self, chunk_boxes: Iterable[tuple[Chunk, Box]], box: Box, dtype: DType, out: memoryview
    ) -> list[ReadRun]:
        """Write `box` into `out`, row-major, as `dtype`, from `chunk_boxes` that tile it. Returns the reads."""
        pieces: list[ReadRun] = []
        for chunk, part_box in chunk_boxes:
            target_span = span_of(part_box, box, None)
            source_span = span_of(part_box, chunk.box, chunk.strides)
            if target_span.is_run and source_span.is_run and chunk.dtype == dtype:
                target = out[
                    target_span.start * dtype.itemsize : (target_span.start + target_span.length) * dtype.itemsize
                ]
                pieces.append(self.read_chunk_into(chunk, source_span.start * dtype.itemsize, target))
            else:
                from ckptkit.engine.rearrange import read_rearranged

                pieces += read_rearranged(self.read_chunk_into, self.scratch, chunk, part_box, dtype, box, out)
        return pieces

    def read_chunk_into(self, chunk: Chunk, start: int, target: memoryview) -> ReadRun:
        """Fill `target` with the bytes of a chunk from byte `start` on, or with zeros for a chunk of zeros."""
        if chunk.is_zeros:
            target[:] = bytes(len(target))
            return ReadRun(chunk, start, len(target), None)
        file, offset = self.files[chunk.path], chunk.offset + start
        crc = 0 if self._sums(chunk) else None
        for at in range(0, len(target), self.step):
            step_target = target[at : at + self.step]
            file.read_into(step_target, offset + at)
            if crc is not None:
                crc = crc32(step_target, crc)
        return ReadRun(chunk, start, len(target), crc)

    def checksum(self, path: str, offset: int, length: int) -> int:
        crc = 0
        for start in range(0, length, BLOCK_BYTES):
            target = self.scratch[: min(BLOCK_BYTES, length - start)]
            self.files[path].read_into(target, offset + start)
            crc = crc32(target, crc)
        return crc


Parts = tuple[tuple[Chunk, Box], ...]  # chunks of a source, each with the box that it shares with an input


class Input(NamedTuple):
    """A box of a tensor in source number `source`, and the parts of chunks that tile the box."""

    source: int
    box: Box
    parts: Parts


class Block(NamedTuple):
    """A byte range of a target's chunk, from byte `start`, that is written at once: its box, and the inputs for it."""

    target: Target
    box: Box
    start: int
    inputs: tuple[Input, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.target.chunk.dtype.itemsize


def blocks_of_plan(plan: Plan) -> Iterator[Block]:
    """Yield the blocks of a plan in the order of its targets. A block has at most `BLOCK_BYTES`."""
    for target in plan.targets:
        yield from blocks_of_target(plan, target)


def blocks_of_target(plan: Plan, target: Target, itemsize: int = 0) -> Iterator[Block]:
    """Yield the blocks of one target in the order of its bytes, small enough for elements of `itemsize` bytes too."""
    recipe, whole, copies = target.recipe, target.chunk.box, target.copies
    # the inputs are the recipe's operands, or the target's own box in each source
    count = len(plan.sources) if recipe is None else len(recipe.operands)
    groups = [copies] if count == 1 else [tuple(copy for copy in copies if copy.operand == i) for i in range(count)]
    wanted: list[tuple[int, Region, tuple[Copy, ...]]]  # source, map from a block's box to the source's, copies
    if recipe is None:
        wanted = [(group[0].source, identity_region, group) for group in groups if group]
    else:
        wanted = [
            (operand.source, operand.region, group) for operand, group in zip(recipe.operands, groups, strict=True)
        ]
    indexes = [BoxIndex([copy.region for copy in group]) for _, _, group in wanted]
    # isinstance with a protocol takes 25 µs, so plain copies skip it
    if recipe is not None and isinstance(recipe, ByRows):
        boxes = cut_rows(whole, recipe.rows)
    else:
        dtypes = [target.chunk.dtype, *(copy.src.dtype for copy in copies)]
        dtypes += () if recipe is None else (operand.dtype for operand in recipe.operands)
        boxes = cut_box(whole, BLOCK_BYTES // max(itemsize, *(dtype.itemsize for dtype in dtypes)))
    start = 0
    for box in boxes:
        inputs: list[Input] = []
        for (source, region_for, group), index in zip(wanted, indexes, strict=True):
            region = region_for(box)
            parts = tuple((group[i].src, part_box) for i, part_box in index.intersections_with(region))
            inputs.append(Input(source, region, parts))
        block = Block(target, box, start, tuple(inputs))
        yield block
        start += block.nbytes
