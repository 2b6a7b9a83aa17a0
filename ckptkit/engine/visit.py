"""Visit the blocks of a plan with threads: read, inspect or write each block, and note the result, or the damage.

A thread holds one block of each source, and one more of any that has its elements in another order; nothing else holds
tensor bytes. Copying, combining, comparing and counting are each a step that is shown every block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from ckptkit.engine.blocks import BLOCK_BYTES, Block, Gatherer, blocks
from ckptkit.errors import CkptError, Corrupt, IOFailure
from ckptkit.io.crc32 import Checksums, crc32, tell_damage
from ckptkit.io.file import OpenFiles
from ckptkit.io.path import REMOTE_JOBS, is_remote
from ckptkit.layout import Chunk, Layout, ReadRun
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Plan, plan_bytes

Unit = TypeVar("Unit")
Step = Callable[[Unit], None]


def work(
    units: Iterable[Unit],
    worker: Callable[[], AbstractContextManager[Step[Unit]]],
    jobs: int | None,
    *sources: Path,
) -> None:
    """Let `jobs` threads, one of which is the caller's, do units in the step that `worker` gives each of them.

    Without a number there are as many as suit the `sources` that they read. The first error ends the work.
    """
    waiting = iter(units)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def take() -> Unit | None:
        with lock:
            return None if errors else next(waiting, None)

    def run() -> None:
        try:
            with worker() as step:
                while (unit := take()) is not None:
                    step(unit)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            errors.append(error)

    others = [threading.Thread(target=run, daemon=True) for _ in range((jobs or default_jobs(*sources)) - 1)]
    try:
        for thread in others:
            with suppress(RuntimeError):  # the system has no more threads: fewer do it
                thread.start()
        run()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C: the others finish their block first
        errors.append(error)
    for thread in others:
        if thread.is_alive():
            thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Exception))  # an interruption before all else


def default_jobs(*sources: Path) -> int:
    """Return how many threads to use by default: enough to keep a disk busy, no more than there are cores.

    Of those that read a remote source most are waiting.
    """
    if any(map(is_remote, sources)):
        return REMOTE_JOBS
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


# Find damage: read every byte of a layout once, and compare each run of bytes with its CRC-32.
#
# Where copying ends at the first run that is damaged, this goes on to the last.
Run = tuple[str, int, int]  # a file, and the offset and length of bytes in it that have a checksum together


def run_of(chunk: Chunk) -> Run:
    """Return the run of bytes that a chunk is, or that it was cut out of."""
    return (chunk.path, *chunk.bytes)


def find_damage(
    layout: Layout, *, jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> dict[Run, CkptError]:
    """Return the runs of bytes that cannot be read, or have another CRC-32 than is recorded, each with the reason.

    The layout has been located. `progress` is told of bytes read, by one thread at a time.
    """
    runs = dict(runs_in(layout))
    sums: Checksums[Run] = Checksums()
    found: dict[Run, CkptError] = {}

    def look(worker: Worker, block: Block) -> int | CkptError:
        chunk, data = block.target.chunk, worker.buffer(block.nbytes)
        try:
            worker.sources[0].load(chunk.path, chunk.offset + block.start, data)
        except (Corrupt, IOFailure) as error:
            return error.with_traceback(None)
        return crc32(data)

    def note(block: Block, seen: int | CkptError, _pieces: Pieces) -> None:
        run = run_of(block.target.chunk)
        if isinstance(seen, CkptError):
            found.setdefault(run, seen)
        else:
            sums.add(run, block.start, block.nbytes, seen)
        if progress:
            progress(block.nbytes)

    visit(plan_bytes(layout.root, sorted(runs)), look, note, jobs)
    for run, recorded in runs.items():
        crc = sums.whole(run, run[2])
        if run not in found and recorded not in (None, crc):
            found[run] = Corrupt(tell_damage(run[2], run[1], crc, recorded))
    return found


def runs_in(layout: Layout) -> Iterator[tuple[Run, int | None]]:
    """Yield each run of bytes that a layout has tensors in, with the CRC-32 that is recorded for it."""
    for tensor in layout.tensors.values():
        for chunk in tensor.chunks:
            if chunk.box.numel and chunk.is_in_file:
                yield run_of(chunk), chunk.crc32


def nbytes_of(layout: Layout) -> int:
    """Return how many bytes are read to find the damage in a layout."""
    return sum(length for _, _, length in dict(runs_in(layout)))


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
