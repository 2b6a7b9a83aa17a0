"""Statistics: worker threads that read every element of a layout and count what numbers it has. Names no format.

A worker holds one block, or two where elements do not lie in a row; nothing else holds tensor bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from ckptkit.engine.gather import BLOCK_BYTES, Gatherer
from ckptkit.engine.workers import Step, work
from ckptkit.errors import CkptError
from ckptkit.layout import Chunk, Layout
from ckptkit.tensors.blocks import cut
from ckptkit.tensors.box import Box
from ckptkit.tensors.counting import Count, count


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a chunk of tensor `name`; by their `number` the blocks are put together, whoever was done first."""

    number: int
    name: str
    chunk: Chunk
    box: Box


class Tally:
    """Counts of tensors, put together block by block: in order, so that a checkpoint always gives the same numbers."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = {name: Count() for name in names}
        self._early: dict[int, tuple[str, Count]] = {}
        self._next = 0

    def add(self, block: Block, fresh: Count) -> None:
        """Take the count of a block; of one whose turn has not come, later."""
        self._early[block.number] = block.name, fresh
        while self._next in self._early:
            name, count = self._early.pop(self._next)
            self.counts[name] = self.counts[name].merge(count)
            self._next += 1


def survey(
    layout: Layout, *, jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> dict[str, Count]:
    """What numbers each tensor of a layout has whose chunks have been located, with `jobs` threads.

    Compares no checksums. `progress` is told of bytes read, by one thread at a time. Raises `Corrupt` where bytes are
    missing.
    """
    tally = Tally(layout.tensors)
    lock = Lock()

    @contextmanager
    def counter() -> Iterator[Step[Block]]:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with Gatherer(layout.root) as source:

            def look(block: Block) -> None:
                dtype = block.chunk.dtype
                data = buffer[: block.box.numel * dtype.itemsize]
                try:
                    source.fill([(block.chunk, block.box)], block.box, dtype, data)
                except CkptError as error:
                    raise error.blame(tensor=block.name) from None
                fresh = count(data, dtype)
                with lock:
                    tally.add(block, fresh)
                    if progress:
                        progress(len(data))

            yield look

    work(blocks_of(layout), counter, jobs, layout.root)
    return tally.counts


def blocks_of(layout: Layout) -> Iterator[Block]:
    """Every chunk, in the order of the files, cut into blocks."""
    chunks = [(chunk, name) for name, tensor in layout.tensors.items() for chunk in tensor.chunks]
    chunks.sort(key=lambda pair: (pair[0].path, pair[0].offset))
    found = (
        (name, chunk, box) for chunk, name in chunks for box in cut(chunk.box, BLOCK_BYTES // chunk.dtype.itemsize)
    )
    for number, (name, chunk, box) in enumerate(found):
        yield Block(number, name, chunk, box)
