"""Statistics: worker threads that read every element of a layout and count what numbers it has. Names no format.

A worker holds one block, or two where elements do not lie in a row; nothing else holds tensor bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from ckptkit.blocks import cut
from ckptkit.box import Box
from ckptkit.counting import Count, count
from ckptkit.errors import CkptError
from ckptkit.gather import BLOCK_BYTES, Gatherer
from ckptkit.layout import Chunk, Layout
from ckptkit.workers import Step, work


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a chunk of tensor `name`."""

    name: str
    chunk: Chunk
    box: Box


def survey(
    layout: Layout, *, jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> dict[str, Count]:
    """What numbers each tensor of a layout has whose chunks have been located, with `jobs` threads.

    Compares no checksums. `progress` is told of bytes read, by one thread at a time. Raises `Corrupt` where bytes are
    missing.
    """
    found = {name: Count() for name in layout.tensors}
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
                    found[block.name] = found[block.name].merge(fresh)
                    if progress:
                        progress(len(data))

            yield look

    work(blocks_of(layout), counter, jobs)
    return found


def blocks_of(layout: Layout) -> Iterator[Block]:
    """Every chunk, in the order of the files, cut into blocks."""
    chunks = [(chunk, name) for name, tensor in layout.tensors.items() for chunk in tensor.chunks]
    for chunk, name in sorted(chunks, key=lambda pair: (pair[0].path, pair[0].offset)):
        for box in cut(chunk.box, BLOCK_BYTES // chunk.dtype.itemsize):
            yield Block(name, chunk, box)
