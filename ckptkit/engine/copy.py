"""Copy by a plan: read, check, convert or combine, and write each block.

A block is a contiguous byte range of the destination, so writing it takes one write. A block is read straight into
place wherever the source is contiguous too. A block with the same bytes in the source and in the destination is copied
in steps that stay in a core's cache, because each byte is touched three times: by the read, the checksum and the write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.engine.blocks import STEP_BYTES, Block, Gatherer
from ckptkit.engine.check_sources import Sources, range_start_of, verify_files_read
from ckptkit.engine.ledger import Journal, Ledger, locate_in_checksummed_range
from ckptkit.engine.shares import WHOLE, Share, UnfinishedUnits, interleave_blocks_of_files
from ckptkit.engine.visit import Pieces, Step, Worker, default_jobs, process_units, visit_blocks
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.io.assembly import AssembledFiles
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.disk import sync_in_background
from ckptkit.io.path import is_remote
from ckptkit.io.progress import BytesDone
from ckptkit.layout import Chunk, FileOffset, ReadRun
from ckptkit.layout.box import span_of
from ckptkit.layout.plan import Plan, Recipe

ByteRun = tuple[int, Chunk, int, int]  # (offset in the block, chunk, offset in the chunk, length), in bytes


@dataclass(frozen=True, slots=True)
class Copied:
    """The CRC-32 of each written chunk, and how many source bytes were verified.

    `uncompared` are source files with one CRC-32 for the whole file that was not compared, because too little was read.
    """

    checksums: Mapping[FileOffset, int]
    checked_bytes: int
    unchecked_bytes: int
    uncompared: Sequence[Path] = ()


def copy_by_plan(
    plan: Plan,
    share: Share = WHOLE,
    journal: Journal | None = None,
    *,
    jobs: int | None = None,
    progress: BytesDone | None = None,
    sync: bool = False,
    output: AssembledFiles | None = None,
) -> Ledger:
    """Execute a share of the plan. Skips the units that the journal lists as finished and whose output is still there.

    Writes into the files of the destination, or into `output`, which is notified of each block. Returns the reads and
    writes, including the journal's entries. With `sync` most of the output has reached the disk on return.
    """
    require_contiguous_order(plan)
    done = finished_units(plan, journal, jobs)
    ledger = Ledger()
    for finished in done.values():
        ledger.add_ledger(finished)
        ledger.resumed_bytes += sum(length for _, _, length, _ in finished.written)
    sources, units = Sources(plan, ledger), UnfinishedUnits(plan, share, done)
    with sync_in_background(plan.dst.root, sync=sync) as schedule_sync:

        def report_block(block: Block) -> None:
            if units.find_ledger(block) is not None:
                schedule_sync(block.target.chunk.path, block.nbytes)
            if progress and units.is_own(block):
                progress(block.nbytes)
            for unit, finished in units.pop_finished(block):
                ledger.add_ledger(finished)
                if journal:
                    journal.record_unit(unit, finished)

        # a store takes the bytes of each file in order, and keeps what comes early in memory
        is_local = output is None and not any(is_remote(layout.root) for layout in plan.sources)
        turns = 2 * (jobs or default_jobs()) if is_local else 1  # twice, so that threads seldom meet in one file
        copy_blocks(
            plan, interleave_blocks_of_files(plan, turns), sources, jobs, units.find_ledger, report_block, output
        )
    return ledger


def require_contiguous_order(plan: Plan) -> None:
    """Raise `Unsupported` if elements to be written would not be contiguous in row-major order."""
    for target in plan.targets:
        if target.chunk.strides is not None:
            message = (
                f"the rows are stored in another order, and {list(target.chunk.size)} of them would not be contiguous"
            )
            hint = "write whole tensors first, then reshard them"
            raise Unsupported(message, path=plan.dst.root / target.chunk.path, tensor=target.name, hint=hint)


def copy_blocks(
    plan: Plan,
    blocks: Iterable[Block],
    sources: Sources,
    jobs: int | None,
    find_ledger: Callable[[Block], Ledger | None],
    report_block: Callable[[Block], None] = lambda _: None,
    output: AssembledFiles | None = None,
) -> None:
    """Write each block that has a ledger, add its reads and its write to the ledger, and report the block."""

    def write(worker: Worker, block: Block) -> tuple[int, bool] | None:
        return None if find_ledger(block) is None else write_block(worker, block, output)

    def record(block: Block, result: tuple[int, bool] | None, pieces: Pieces) -> None:
        ledger = find_ledger(block)
        if result is not None and ledger is not None:
            crc, has_remark = result
            sources.record_reads(pieces)
            for number, of_source in enumerate(pieces):
                for piece in of_source:
                    if piece.crc is not None:
                        path, offset, start = locate_in_checksummed_range(piece.chunk, piece.start)
                        ledger.read.add((number, path, offset), start, piece.length, piece.crc)
            path, offset, start = locate_in_checksummed_range(block.target.chunk, block.start)
            ledger.written.add((path, offset), start, block.nbytes, crc)
            if has_remark:
                ledger.noted.add(block.target.name)
        report_block(block)

    visit_blocks(plan, write, record, jobs, sums=sources.is_checksum_needed, among=blocks, output=output)


def write_block(worker: Worker, block: Block, output: AssembledFiles | None) -> tuple[int, bool]:
    """Write a block. Returns its CRC-32, and whether a recipe has a remark on the tensor."""
    recipe, target, has_remark = block.target.recipe, block.target.chunk, False
    crc = try_copy_unchanged(worker, block) if recipe is None else None
    if crc is None:
        if recipe is None:
            data = worker.read_input(block)
        else:
            data, has_remark = apply_recipe(recipe, worker, block)
        worker.files[target.path].write_at(data, target.offset + block.start)
        crc = checksum_of_block(block, worker.pieces, data)
    if output is not None:
        output.record_written(*locate_in_checksummed_range(target, block.start), block.nbytes, crc)
    return crc, has_remark


def try_copy_unchanged(worker: Worker, block: Block) -> int | None:
    """Copy a block without changing its bytes, in steps that stay in a core's cache, and return its CRC-32.

    Returns None, and does nothing, if the block must be gathered: its elements change order or dtype, or it has so many
    byte ranges that one write is faster.
    """
    runs = find_byte_ranges_of(block)
    if runs is None:
        return None
    target = block.target.chunk
    source, begin, whole = worker.sources[0], target.offset + block.start, 0
    for at, chunk, start, length in runs:
        read_from, write_to, crc = source.files[chunk.path], worker.files[target.path], 0
        for done in range(0, length, source.step):
            data = worker.input_buffer(min(source.step, length - done))
            read_from.read_into(data, chunk.offset + start + done)
            crc = crc32(data, crc)
            write_to.write_at(data, begin + at + done)
        worker.pieces[0].append(ReadRun(chunk, start, length, crc))
        whole = combine_crc32(whole, crc, length)
    return whole


def find_byte_ranges_of(block: Block) -> list[ByteRun] | None:
    """Return the byte ranges that form a block, in order; None if the block must be gathered."""
    parts = block.inputs[0].parts
    dtype = block.target.chunk.dtype
    if (len(parts) - 1) * STEP_BYTES > block.nbytes:
        return None
    runs: list[ByteRun] = []
    for chunk, box in parts:
        target_span, source_span = span_of(box, block.box, None), span_of(box, chunk.box, chunk.strides)
        if not (target_span.is_run and source_span.is_run and chunk.dtype == dtype) or chunk.is_zeros:
            return None
        runs.append(
            (
                target_span.start * dtype.itemsize,
                chunk,
                source_span.start * dtype.itemsize,
                target_span.length * dtype.itemsize,
            )
        )
    return sorted(runs)


def apply_recipe(recipe: Recipe, worker: Worker, block: Block) -> tuple[memoryview, bool]:
    """Return a block that a recipe computes from its inputs, and whether the recipe has a remark on the tensor."""
    operands = enumerate(recipe.operands)
    inputs = [worker.read_operand(block, number, operand.dtype) for number, operand in operands]
    return recipe(block.box, block.target.chunk.dtype, inputs)


def checksum_of_block(block: Block, pieces: Pieces, data: memoryview) -> int:
    """Return the CRC-32 of a finished block. Reuses the CRC-32 of its read if the block still has the same bytes."""
    if block.target.recipe is None and len(block.inputs[0].parts) == len(pieces[0]) == 1:
        piece = pieces[0][0]
        is_as_it_lay = piece.chunk.strides is None and piece.chunk.dtype == block.target.chunk.dtype
        if piece.crc is not None and is_as_it_lay and piece.length == block.nbytes:
            return piece.crc
    return crc32(data)


def finished_units(plan: Plan, journal: Journal | None, jobs: int | None) -> dict[int, Ledger]:
    """Return the units in a journal whose output is undamaged. The output of a worker that ended is not read again."""
    # A worker that ended has synced its files before it wrote its last line.
    if journal is None or journal.has_ended:
        return {} if journal is None else dict(journal.units)
    is_intact = dict.fromkeys(journal.units, True)
    lock = threading.Lock()

    @contextmanager
    def checker() -> Iterator[Step[int]]:
        with closing(Gatherer(plan.dst.root)) as source:

            def check(unit: int) -> None:
                is_equal = all(
                    source.checksum(path, offset + start, length) == crc
                    for (path, offset), start, length, crc in journal.units[unit].written
                )
                with lock:
                    is_intact[unit] = is_equal

            yield check

    process_units(journal.units, checker, jobs)
    return {unit: ledger for unit, ledger in journal.units.items() if is_intact[unit]}


def verify_copy(plan: Plan, ledger: Ledger, *, jobs: int | None = None) -> Copied:
    """Verify every source chunk that has a CRC-32. Raises `Corrupt` if one differs, or not all was written."""
    sources = Sources(plan, ledger)
    reread_unchecked_ranges(sources, jobs)
    checksums: dict[FileOffset, int] = {}
    for target in plan.targets:
        crc = ledger.written.find_complete_crc(range_start_of(target.chunk), target.chunk.checksummed_range[1])
        if crc is None:
            raise Corrupt("not all bytes were written", path=plan.dst.root / target.chunk.path, tensor=target.name)
        checksums[range_start_of(target.chunk)] = crc
    checked, uncompared = 0, list[Path]()
    if unchecked := sources.unchecked_in_checksummed_files:
        checked, uncompared = verify_files_read(plan.sources, ledger.read, unchecked)
    return Copied(checksums, sources.checked_bytes + checked, sources.unchecked_bytes - checked, uncompared)


def reread_unchecked_ranges(sources: Sources, jobs: int | None) -> None:
    """Re-read the byte ranges whose checksum is still unknown, and verify them."""

    def read_block(worker: Worker, block: Block) -> None:
        worker.read_input(block)

    def record(_block: Block, _seen: None, pieces: Pieces) -> None:
        sources.record_reads(pieces)

    visit_blocks(sources.plan_unread_ranges(), read_block, record, jobs, sums=sources.is_awaiting_comparison)
