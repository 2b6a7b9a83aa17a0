"""Copy by a plan: read, check, convert or combine, and write each block.

A block is a contiguous run of the destination, so each is one write, and is read straight into place wherever the
source is contiguous too. A block whose bytes are the same in the source and in the destination is copied in steps that
stay in a core's cache: each step is touched three times, by the read, the checksum and the write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.engine.blocks import STEP_BYTES, Block, Gatherer
from ckptkit.engine.check_sources import Sources, place_of
from ckptkit.engine.ledger import Journal, Ledger, place_in_run
from ckptkit.engine.shares import WHOLE, Share, units_of
from ckptkit.engine.visit import Pieces, Step, Worker, visit, work
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.io.assembly import AssembledFiles
from ckptkit.io.crc32 import combine, crc32
from ckptkit.io.disk import early_sync
from ckptkit.layout import Chunk, FileOffset, ReadRun
from ckptkit.layout.box import span_of
from ckptkit.layout.plan import Plan, Recipe

Progress = Callable[[int], None]
ByteRun = tuple[int, Chunk, int, int]  # where in the block, of which chunk, where in that, and how long; in bytes


@dataclass(frozen=True, slots=True)
class Copied:
    """The CRC-32 of each chunk written, and how many source bytes had one to compare with.

    `uncompared` are source files that have one CRC-32 for the whole file, and were read too little to compare it.
    """

    checksums: Mapping[FileOffset, int]
    checked_bytes: int
    unchecked_bytes: int
    uncompared: Sequence[Path] = ()


def copy(
    plan: Plan,
    share: Share = WHOLE,
    journal: Journal | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    sync: bool = False,
    output: AssembledFiles | None = None,
) -> Ledger:
    """Do a share of the plan, but for the units that the journal says are done and that are still there.

    The blocks go into the files of the destination, or into those of `output`, which is told of each. Returns what was
    read and written, by the journal's account too. With `sync` the disk has most of it by then.
    """
    check_order(plan)
    done = finished_units(plan, journal, jobs)
    ledger = Ledger()
    for finished in done.values():
        ledger.add(finished)
        ledger.resumed_bytes += sum(length for _, _, length, _ in finished.written)
    sources = Sources(plan, ledger)
    own = share.units(plan.whole_nbytes)
    with early_sync(plan.dst.root, sync=sync) as wrote:

        def tell(block: Block) -> None:
            wrote(block.target.chunk.path, block.nbytes)
            if progress:
                progress(block.nbytes)

        for unit, group in units_of(plan, share.unit_bytes(plan.whole_nbytes)):
            if unit not in own:
                continue
            if unit in done:
                if progress:
                    progress(sum(block.nbytes for block in group))
                continue
            fresh = copy_unit(plan, group, sources, jobs, tell, output)
            ledger.add(fresh)
            if journal:
                journal.note(unit, fresh)
    return ledger


def check_order(plan: Plan) -> None:
    """Raise `Unsupported` if elements that are to be written do not lie together in the order of their indices."""
    for target in plan.targets:
        if target.chunk.strides is not None:
            message = (
                f"the rows are stored in another order, and {list(target.chunk.size)} of them would not be contiguous"
            )
            hint = "write whole tensors first, then reshard them"
            raise Unsupported(message, path=plan.dst.root / target.chunk.path, tensor=target.name, hint=hint)


def copy_unit(
    plan: Plan,
    unit: Iterator[Block],
    sources: Sources,
    jobs: int | None,
    tell: Callable[[Block], None],
    output: AssembledFiles | None = None,
) -> Ledger:
    """Make the blocks of a unit, and tell of each. Returns what was read and written for them."""
    ledger = Ledger()

    def make(worker: Worker, block: Block) -> tuple[int, bool]:
        recipe = block.target.recipe
        crc, has_remark = (copy_unchanged(worker, block) if recipe is None else None), False
        if crc is None:
            data, has_remark = (worker.read(block), False) if recipe is None else apply_recipe(recipe, worker, block)
            worker.write(block, data)
            crc = checksum(block, worker.pieces, data)
        if output is not None:
            output.note(*place_in_run(block.target.chunk, block.start), block.nbytes, crc)
        return crc, has_remark

    def note(block: Block, made: tuple[int, bool], pieces: Pieces) -> None:
        crc, has_remark = made
        sources.note(pieces)
        for number, found in enumerate(pieces):
            ledger.add_read(number, found)
        ledger.add_written(block.target.chunk, block.start, block.nbytes, crc)
        if has_remark:
            ledger.noted.add(block.target.name)
        tell(block)

    visit(plan, make, note, jobs, sums=sources.records, among=unit, output=output)
    return ledger


def copy_unchanged(worker: Worker, block: Block) -> int | None:
    """Copy a block to where it belongs and return its CRC-32. Returns None, and does nothing, if it must be gathered.

    A block is gathered if its elements change their order or dtype, or if it has so many runs that one write is better.
    """
    runs = runs_of(block)
    if runs is None:
        return None
    target = block.target.chunk
    begin = target.offset + block.start
    whole = 0
    for at, chunk, start, length in runs:
        crc = copy_run(worker, chunk, start, length, target.path, begin + at)
        worker.pieces[0].append(ReadRun(chunk, start, length, crc))
        whole = combine(whole, crc, length)
    return whole


def runs_of(block: Block) -> list[ByteRun] | None:
    """Return the runs of bytes that a block is made of, in order; None if it is to be gathered."""
    parts = block.inputs[0].parts
    dtype = block.target.chunk.dtype
    if (len(parts) - 1) * STEP_BYTES > block.nbytes:
        return None
    runs: list[ByteRun] = []
    for chunk, part in parts:
        here, there = span_of(part, block.box, None), span_of(part, chunk.box, chunk.strides)
        if not (here.is_run and there.is_run and chunk.dtype == dtype) or chunk.is_zeros:
            return None
        runs.append((here.start * dtype.itemsize, chunk, there.start * dtype.itemsize, here.length * dtype.itemsize))
    return sorted(runs)


def copy_run(worker: Worker, chunk: Chunk, start: int, length: int, path: str, offset: int) -> int:
    """Copy `length` bytes of a chunk from `start` to `offset` of file `path`, step by step, and return their CRC-32."""
    step = worker.sources[0].step
    source, target = worker.sources[0].files[chunk.path], worker.files[path]
    crc = 0
    for done in range(0, length, step):
        data = worker.buffer(min(step, length - done))
        source.read_into(data, chunk.offset + start + done)
        crc = crc32(data, crc)
        target.write_at(data, offset + done)
    return crc


def apply_recipe(recipe: Recipe, worker: Worker, block: Block) -> tuple[memoryview, bool]:
    """Return a block made of its inputs by a recipe, and whether its tensor is worth a note."""
    operands = enumerate(recipe.operands)
    inputs = [worker.operand(block, number, operand.dtype) for number, operand in operands]
    return recipe(block.box, block.target.chunk.dtype, inputs)


def checksum(block: Block, pieces: Pieces, data: memoryview) -> int:
    """Return the CRC-32 of a finished block: that of the one piece that it was read in, if it still is that."""
    if block.target.recipe is None and len(block.inputs[0].parts) == len(pieces[0]) == 1:
        piece = pieces[0][0]
        is_as_it_lay = piece.chunk.strides is None and piece.chunk.dtype == block.target.chunk.dtype
        if piece.crc is not None and is_as_it_lay and piece.length == block.nbytes:
            return piece.crc
    return crc32(data)


def finished_units(plan: Plan, journal: Journal | None, jobs: int | None) -> dict[int, Ledger]:
    """Return the units that a journal has, if what they wrote is there; of a worker that ended, without looking."""
    if journal is None or journal.has_ended:
        return {} if journal is None else dict(journal.units)
    there = dict.fromkeys(journal.units, True)
    lock = threading.Lock()

    @contextmanager
    def checker() -> Iterator[Step[int]]:
        with closing(Gatherer(plan.dst.root)) as source:

            def check(unit: int) -> None:
                found = all(
                    source.checksum(path, offset + start, length) == crc
                    for (path, offset), start, length, crc in journal.units[unit].written
                )
                with lock:
                    there[unit] = found

            yield check

    work(journal.units, checker, jobs)
    return {unit: ledger for unit, ledger in journal.units.items() if there[unit]}


def check_complete(plan: Plan, ledger: Ledger, *, jobs: int | None = None) -> Copied:
    """Check that all of a plan was done, in whatever shares, and that every source chunk has its recorded CRC-32.

    Raises `Corrupt` for a chunk that was not written whole, or a source chunk or file that differs.
    """
    sources = Sources(plan, ledger)
    scrub(sources, jobs)
    checksums: dict[FileOffset, int] = {}
    for target in plan.targets:
        crc = ledger.written.whole(place_of(target.chunk), target.chunk.bytes[1])
        if crc is None:
            raise Corrupt("not all bytes were written", path=plan.dst.root / target.chunk.path, tensor=target.name)
        checksums[place_of(target.chunk)] = crc
    checked, left = compare_files(plan, ledger, sources.unchecked)
    return Copied(checksums, sources.checked_bytes + checked, sources.unchecked_bytes - checked, left)


def compare_files(plan: Plan, ledger: Ledger, unchecked: Mapping[tuple[int, str], int]) -> tuple[int, Sequence[Path]]:
    """Compare source files with the CRC-32 of the whole; see `whole_files.compare_read`."""
    if not unchecked:
        return 0, ()
    from ckptkit.engine.whole_files import compare_read  # only where a manifest has files alone

    return compare_read(plan.sources, ledger.read, unchecked)


def scrub(sources: Sources, jobs: int | None) -> None:
    """Re-read the runs whose checksum is still unknown, and compare them."""

    def look(worker: Worker, block: Block) -> None:
        worker.read(block)

    def note(_block: Block, _seen: None, pieces: Pieces) -> None:
        sources.note(pieces)

    visit(sources.unfinished(), look, note, jobs, sums=sources.compares)
