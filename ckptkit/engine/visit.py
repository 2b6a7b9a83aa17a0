"""Visit the blocks of a plan with threads: read, inspect or write each block, and record the result, or the damage.

A thread keeps one block of each source in memory, and one more if elements must be reordered. Copying, combining,
comparing and counting are each a function that is called with every block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ckptkit.engine.blocks import BLOCK_BYTES, Block, Gatherer, blocks_of_plan
from ckptkit.errors import CkptError, Corrupt, IOFailure, errors_at
from ckptkit.io.assembly import AssembledFiles
from ckptkit.io.crc32 import Checksums, crc32, damage_message
from ckptkit.io.file import OpenFiles
from ckptkit.io.path import REMOTE_JOBS, is_remote
from ckptkit.io.progress import BytesDone
from ckptkit.layout import Chunk, Layout, ReadRun
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Plan, plan_range_reads

Unit = TypeVar("Unit")
Step = Callable[[Unit], None]


def process_units(
    units: Iterable[Unit],
    worker: Callable[[], AbstractContextManager[Step[Unit]]],
    jobs: int | None,
    *sources: Path,
) -> None:
    """Process units with `jobs` threads, or as many as suit the `sources`. The first error stops all threads."""
    waiting = iter(units)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def process() -> None:
        try:
            with worker() as step:
                while True:
                    with lock:
                        unit = None if errors else next(waiting, None)
                    if unit is None:
                        return
                    step(unit)
        except BaseException as error:  # noqa: BLE001 - raised by the calling thread below
            errors.append(error)

    others = [threading.Thread(target=process, daemon=True) for _ in range((jobs or default_jobs(*sources)) - 1)]
    try:
        for thread in others:
            with suppress(RuntimeError):  # the system has no more threads: continue with fewer
                thread.start()
        process()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C: the others finish their block first
        errors.append(error)
    for thread in others:
        if thread.is_alive():
            thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Exception))  # Ctrl-C takes precedence over errors


def default_jobs(*sources: Path) -> int:
    """Return enough threads to keep a disk busy, at most one per core; more for a remote source, as most just wait."""
    if any(map(is_remote, sources)):
        return REMOTE_JOBS
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


# Finding damage reads every byte of a layout once. Copying stops at the first damaged byte range; this goes on to the
# last one.
Run = tuple[str, int, int]  # file, offset and length of bytes that share one checksum


def byte_range_of_chunk(chunk: Chunk) -> Run:
    """Return the byte range of a chunk, or of the storage that it is a part of."""
    return (chunk.path, *chunk.checksummed_range)


def find_damaged_ranges(
    layout: Layout, *, jobs: int | None = None, progress: BytesDone | None = None
) -> dict[Run, CkptError]:
    """Return the byte ranges of a located layout that cannot be read, or whose CRC-32 differs, each with the error."""
    runs = dict(byte_ranges_in(layout))
    sums: Checksums[Run] = Checksums()
    damage: dict[Run, CkptError] = {}

    def sum_block(worker: Worker, block: Block) -> int | CkptError:
        try:
            return crc32(worker.read_stored_bytes(block))
        except (Corrupt, IOFailure) as error:
            return error.with_traceback(None)

    def record(block: Block, seen: int | CkptError, _pieces: Pieces) -> None:
        run = byte_range_of_chunk(block.target.chunk)
        if isinstance(seen, CkptError):
            damage.setdefault(run, seen)
        else:
            sums.add(run, block.start, block.nbytes, seen)
        if progress:
            progress(block.nbytes)

    visit_blocks(plan_range_reads(layout.root, sorted(runs)), sum_block, record, jobs)
    for run, recorded in runs.items():
        crc = sums.find_complete_crc(run, run[2])
        if run not in damage and recorded not in (None, crc):
            damage[run] = Corrupt(damage_message(run[2], run[1], crc, recorded))
    return damage


def byte_ranges_in(layout: Layout) -> Iterator[tuple[Run, int | None]]:
    """Yield each byte range that tensors of a layout use, with its recorded CRC-32."""
    for tensor in layout.tensors.values():
        for chunk in tensor.chunks:
            if chunk.box.numel and chunk.is_in_file:
                yield byte_range_of_chunk(chunk), chunk.crc32


Seen = TypeVar("Seen")
Pieces = Sequence[Sequence[ReadRun]]  # the byte ranges read from each source
Sums = Callable[[int, Chunk], bool]  # (source index, chunk) -> whether to compute the CRC-32 of its reads


class Worker:
    """The open files of one thread, and a buffer for each input of a block. The buffers are reused for every block."""

    def __init__(self, plan: Plan, sums: Sums, output: AssembledFiles | None = None) -> None:
        self.sources = [Gatherer(layout.root, partial(sums, i)) for i, layout in enumerate(plan.sources)]
        self.pieces: list[list[ReadRun]] = [[] for _ in self.sources]  # read for the current block
        self._buffers: dict[int, memoryview] = {}
        self._buffered: dict[int, tuple[str, Box]] = {}  # the target and box that are in an operand's buffer
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

    def input_buffer(self, nbytes: int, input_index: int = 0) -> memoryview:
        """Return the first `nbytes` of the buffer of input `input_index`, which grows to at least one block."""
        if len(self._buffers.get(input_index, b"")) < max(nbytes, 1):
            self._buffers[input_index] = memoryview(bytearray(max(nbytes, BLOCK_BYTES)))
        return self._buffers[input_index][:nbytes]

    def read_input(
        self, block: Block, input_index: int = 0, dtype: DType | None = None, out: memoryview | None = None
    ) -> memoryview:
        """Return the elements of input `input_index` of a block: row-major, as `dtype`, by default the target's.

        They are in `out`, or in the input's buffer until the next read of this input.
        """
        dtype, wanted = dtype or block.target.chunk.dtype, block.inputs[input_index]
        if out is None:
            out = self.input_buffer(wanted.box.numel * dtype.itemsize, input_index)
        self.pieces[wanted.source] = self.sources[wanted.source].gather_box(wanted.parts, wanted.box, dtype, out)
        return out

    def read_operand(self, block: Block, input_index: int, dtype: DType) -> memoryview:
        """Return an input of a block as `dtype`. Not read again if the target's previous block had the same input."""
        wanted = block.inputs[input_index]
        if self._buffered.get(input_index) == (block.target.name, wanted.box):
            return self.input_buffer(wanted.box.numel * dtype.itemsize, input_index)
        self._buffered.pop(input_index, None)
        earlier_reads = self.pieces[wanted.source]
        data = self.read_input(block, input_index, dtype)
        self.pieces[wanted.source] = earlier_reads + self.pieces[wanted.source]
        self._buffered[input_index] = block.target.name, wanted.box
        return data

    def read_stored_bytes(self, block: Block) -> memoryview:
        """Return the bytes at the place of a block in the files of the first source, until the next read."""
        chunk, data = block.target.chunk, self.input_buffer(block.nbytes)
        self.sources[0].files[chunk.path].read_into(data, chunk.offset + block.start)
        return data


def visit_blocks(
    plan: Plan,
    process: Callable[[Worker, Block], Seen],
    record: Callable[[Block, Seen, Pieces], None],
    jobs: int | None = None,
    *,
    sums: Sums = lambda _number, _chunk: False,
    among: Iterable[Block] | None = None,
    output: AssembledFiles | None = None,
) -> None:
    """Call `process` for every block of a plan, or of `among`, with `jobs` threads, and `record` with each result.

    Workers write to the files of `output`, by default to the destination's directory. `record` also gets the byte
    ranges that were read, with the CRC-32 of the chunks for which `sums` returns True; only one thread at a time calls
    it. An error names the block's tensor; the other threads finish their block, and the work stops.
    """
    lock = threading.Lock()

    @contextmanager
    def worker() -> Iterator[Step[Block]]:
        with Worker(plan, sums, output) as own:

            def step(block: Block) -> None:
                own.pieces = [[] for _ in own.sources]
                with errors_at(tensor=block.target.name or None):
                    seen = process(own, block)
                    with lock:
                        record(block, seen, own.pieces)

            yield step

    roots = (layout.root for layout in plan.sources)
    process_units(blocks_of_plan(plan) if among is None else among, worker, jobs, *roots)
