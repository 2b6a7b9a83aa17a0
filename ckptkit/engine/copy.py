"""Executes plans: worker threads that read, check, convert and write blocks of bounded size. Names no format.

A worker holds one block in and one block out; nothing else holds tensor bytes. A block is a contiguous run of the
destination, so each is one write, and is read straight into place wherever the source is contiguous too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckptkit.engine.gather import BLOCK_BYTES, Gatherer
from ckptkit.engine.journal import Journal
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.sources import Sources, place_of
from ckptkit.engine.units import WHOLE, Block, Share, units_of
from ckptkit.engine.workers import Step, work
from ckptkit.errors import CkptError, Corrupt
from ckptkit.files.crc32 import crc32
from ckptkit.files.file import Opened
from ckptkit.layout import Chunk, Piece, Place
from ckptkit.plan import Plan

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Copied:
    """What an execution saw: the CRC-32 of each chunk written, and how many source bytes had one to compare with."""

    checksums: Mapping[Place, int]
    checked_bytes: int
    unchecked_bytes: int


def execute(plan: Plan, *, jobs: int | None = None, progress: Progress | None = None) -> Copied:
    """Fill every chunk of the plan's destination, which is allocated already, with `jobs` threads.

    Each source chunk is compared with the CRC-32 recorded for it; `Corrupt` names tensor, file and offset of one that
    differs. `progress` is told of bytes written, by one thread at a time.
    """
    return settle(plan, copy(plan, jobs=jobs, progress=progress), jobs=jobs)


def copy(
    plan: Plan,
    share: Share = WHOLE,
    journal: Journal | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Ledger:
    """Do a share of the plan, but for what the journal says is done and is still there. What was read and written."""
    done = finished_units(plan, journal, jobs)
    ledger = Ledger()
    for units in done.values():
        ledger.add(units)
    sources = Sources(plan, ledger)
    for unit, group in units_of(plan, share.unit_bytes(plan)):
        if not share.has(unit, plan):
            continue
        if unit in done:
            if progress:
                progress(sum(block.nbytes for block in group))
            continue
        fresh = Ledger()
        work(group, partial(copier, plan, sources, fresh, progress), jobs, plan.src.root)
        ledger.add(fresh)
        if journal:
            journal.note(unit, fresh)
    return ledger


@contextmanager
def copier(plan: Plan, sources: Sources, ledger: Ledger, progress: Progress | None) -> Iterator[Step[Block]]:
    """What a worker thread does with each block: read, convert, write, and note it."""
    out = memoryview(bytearray(BLOCK_BYTES))
    with Gatherer(plan.src.root) as source, Opened(plan.dst.root, writable=True) as files:

        def copy_block(block: Block) -> None:
            chunk, data = block.target.chunk, out[: block.nbytes]
            pieces = fill(source, block, data)
            files[chunk.path].write_at(data, chunk.offset + block.start)
            crc = checksum(block, pieces, data)
            with sources.lock:
                sources.note(pieces)
                for piece in pieces:
                    ledger.read.add(place_of(piece.chunk), piece.start, piece.length, piece.crc)
                ledger.written.add(place_of(chunk), block.start, block.nbytes, crc)
                if progress:
                    progress(block.nbytes)

        yield copy_block


def finished_units(plan: Plan, journal: Journal | None, jobs: int | None) -> dict[int, Ledger]:
    """The units that a journal has, if what they wrote is there; of a worker that ended, without looking."""
    if journal is None or journal.has_ended:
        return {} if journal is None else dict(journal.units)
    there = dict.fromkeys(journal.units, True)
    lock = threading.Lock()

    @contextmanager
    def checker() -> Iterator[Step[int]]:
        with Gatherer(plan.dst.root) as source:

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


def settle(plan: Plan, ledger: Ledger, *, jobs: int | None = None) -> Copied:
    """Check that all of a plan was done, by whomever, and that every source chunk is what its CRC-32 says."""
    sources = Sources(plan, ledger)
    scrub(sources, jobs)
    checksums: dict[Place, int] = {}
    for target in plan.targets:
        crc = ledger.written.whole(place_of(target.chunk), target.chunk.length)
        if crc is None:
            raise Corrupt("not all of it was written", path=plan.dst.root / target.chunk.path, tensor=target.name)
        checksums[place_of(target.chunk)] = crc
    return Copied(checksums, sources.checked_bytes, sources.unchecked_bytes)


def fill(source: Gatherer, block: Block, data: memoryview) -> list[Piece]:
    """Gather a block's elements into `data`; an error names the tensor."""
    try:
        return source.fill(block.parts, block.box, block.target.chunk.dtype, data)
    except CkptError as error:
        raise error.blame(tensor=block.target.name) from None


def checksum(block: Block, pieces: list[Piece], data: memoryview) -> int:
    """CRC-32 of a finished block: that of the one piece that it was read in, if it was and nothing was converted."""
    if len(block.parts) == len(pieces) == 1:
        piece = pieces[0]
        if piece.length == block.nbytes and piece.chunk.dtype == block.target.chunk.dtype:
            return piece.crc
    return crc32(data)


def scrub(sources: Sources, jobs: int | None) -> None:
    """Read the chunks that were not read whole once more, from end to end, to compare their CRC-32."""

    @contextmanager
    def scrubber() -> Iterator[Step[Chunk]]:
        with Gatherer(sources.root) as source:

            def read(chunk: Chunk) -> None:
                starts = range(0, chunk.length, BLOCK_BYTES)
                pieces = [source.read(chunk, start, min(BLOCK_BYTES, chunk.length - start)) for start in starts]
                with sources.lock:
                    sources.forget(chunk)
                    sources.note(pieces)

            yield read

    work(sources.unfinished(), scrubber, jobs, sources.root)
