"""Visit the blocks of a plan with threads: read, inspect or write each block, and note the result.

A thread holds one block of each source, and one more of any that has its elements in another order; nothing else holds
tensor bytes. Copying, combining, comparing and counting are each a step that is shown every block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from ckptkit.engine.blocks import Block, blocks
from ckptkit.engine.gather import BLOCK_BYTES, Gatherer
from ckptkit.engine.workers import Step, work
from ckptkit.errors import CkptError
from ckptkit.io.file import OpenFiles
from ckptkit.layout import Chunk, ReadRun
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Plan

Seen = TypeVar("Seen")
Pieces = Sequence[Sequence[ReadRun]]  # what was read of each source in one piece
Sums = Callable[[int, Chunk], bool]  # whether to compute the CRC-32 of what is read of a chunk of this source


class WritableFile(Protocol):
    """A file that blocks are written to."""

    def write_at(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at byte `offset`."""


class WritableFiles(Protocol):
    """Files that blocks are written to, by name."""

    def __getitem__(self, name: str) -> WritableFile:
        """Return a file."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close what is open. A thread has ended, maybe with an error."""


def no_sums(_number: int, _chunk: Chunk) -> bool:
    """Compute the CRC-32 of no chunk."""
    return False


class Worker:
    """The open files of one thread, and a buffer for each input of a block, which it keeps from block to block."""

    def __init__(self, plan: Plan, sums: Sums, output: WritableFiles | None = None) -> None:
        self.sources = [Gatherer(layout.root, partial(sums, i)) for i, layout in enumerate(plan.sources)]
        self.pieces: list[list[ReadRun]] = [[] for _ in self.sources]  # read for the block at hand
        self._buffers: dict[int, memoryview] = {}
        self._held: dict[int, tuple[str, Box]] = {}  # of operands: the target and the box that is in the buffer
        self.files = output or OpenFiles(plan.dst.root, writable=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            closing.callback(self.files.__exit__, kind, error, trace)
            for source in self.sources:
                closing.callback(source.close)

    def buffer(self, nbytes: int, number: int = 0) -> memoryview:
        """Return the first bytes of the buffer of an input: a block's worth, or as many as are asked for."""
        if len(self._buffers.get(number, b"")) < max(nbytes, 1):
            self._buffers[number] = memoryview(bytearray(max(nbytes, BLOCK_BYTES)))
        return self._buffers[number][:nbytes]

    def read(
        self, block: Block, number: int = 0, dtype: DType | None = None, out: memoryview | None = None
    ) -> memoryview:
        """Return the elements of an input of a block: row-major, as `dtype`, or as the target stores them.

        They are in `out`, or else in the buffer of the input until it is read into again.
        """
        dtype, found = dtype or block.target.chunk.dtype, block.inputs[number]
        if out is None:
            out = self.buffer(found.box.numel * dtype.itemsize, number)
        self.pieces[found.source] = self.sources[found.source].fill(found.parts, found.box, dtype, out)
        return out

    def operand(self, block: Block, number: int, dtype: DType) -> memoryview:
        """Return an input of a block as `dtype`; not read again if the block before of this target had the same."""
        found = block.inputs[number]
        if self._held.get(number) == (block.target.name, found.box):
            return self.buffer(found.box.numel * dtype.itemsize, number)
        self._held.pop(number, None)
        before = self.pieces[found.source]
        data = self.read(block, number, dtype)
        self.pieces[found.source] = before + self.pieces[found.source]
        self._held[number] = block.target.name, found.box
        return data

    def write(self, block: Block, data: memoryview) -> None:
        """Write a block to where it belongs in the destination."""
        chunk = block.target.chunk
        self.files[chunk.path].write_at(data, chunk.offset + block.start)


def visit(
    plan: Plan,
    look: Callable[[Worker, Block], Seen],
    note: Callable[[Block, Seen, Pieces], None],
    jobs: int | None = None,
    *,
    sums: Sums = no_sums,
    among: Iterable[Block] | None = None,
    output: WritableFiles | None = None,
) -> None:
    """Let `jobs` threads `look` at every block of a plan, or at those `among` them, and `note` what was seen.

    Workers write to the files of `output`, by default those in the destination's directory. `note` gets what was read
    besides, with the CRC-32 of the chunks for which `sums` returns True; one thread at a time is in it. An error names
    the block's tensor; the other threads finish their block and the work ends.
    """
    lock = threading.Lock()

    @contextmanager
    def worker() -> Iterator[Step[Block]]:
        with Worker(plan, sums, output) as own:

            def step(block: Block) -> None:
                own.pieces = [[] for _ in own.sources]
                try:
                    seen = look(own, block)
                    with lock:
                        note(block, seen, own.pieces)
                except CkptError as error:
                    error.blame(tensor=block.target.name or None)
                    raise

            yield step

    roots = (layout.root for layout in plan.sources)
    work(blocks(plan) if among is None else among, worker, jobs, *roots)
