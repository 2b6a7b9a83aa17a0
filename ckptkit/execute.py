"""Executes plans: worker threads that read, check, convert and write blocks of bounded size. Names no format.

A worker holds one block in and one block out; nothing else holds tensor bytes. A block is a contiguous run of the
destination, so each is one write, and is read straight into place wherever the source is contiguous too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ckptkit.blocks import cut, span_of
from ckptkit.box import Box, BoxIndex
from ckptkit.checksums import Checksums, crc32
from ckptkit.errors import CkptError, Corrupt
from ckptkit.files import Opened, write_from
from ckptkit.gather import BLOCK_BYTES, Gatherer
from ckptkit.layout import Chunk, Piece, Place
from ckptkit.plan import Plan, Target

Progress = Callable[[int], None]
Unit = TypeVar("Unit")
Worker = Callable[[], AbstractContextManager[Callable[[Unit], None]]]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a target, made at once: a box of it, and what it is made of: source chunks with the boxes shared."""

    target: Target
    box: Box
    parts: tuple[tuple[Chunk, Box], ...]

    @property
    def start(self) -> int:
        """Its first byte, counted from the start of the target's chunk."""
        return span_of(self.box, self.target.chunk.box, None).start * self.target.chunk.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Its bytes in the destination."""
        return self.box.numel * self.target.chunk.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Copied:
    """What an execution saw: the CRC-32 of each chunk written, and how many source bytes had one to compare with."""

    checksums: dict[Place, int]
    checked_bytes: int
    unchecked_bytes: int


def execute(plan: Plan, *, jobs: int | None = None, progress: Progress | None = None) -> Copied:
    """Fill every chunk of the plan's destination, which is allocated already, with `jobs` threads.

    Each source chunk is compared with the CRC-32 recorded for it; `Corrupt` names tensor, file and offset of one that
    differs. `progress` is told of bytes written, by one thread at a time.
    """
    sources = Sources(plan)
    written: Checksums[Place] = Checksums()
    lock = threading.Lock()

    @contextmanager
    def copier() -> Iterator[Callable[[Block], None]]:
        out = memoryview(bytearray(BLOCK_BYTES))
        with Gatherer(plan.src.root) as source, Opened(plan.dst.root, writable=True) as files:

            def copy(block: Block) -> None:
                chunk, data = block.target.chunk, out[: block.nbytes]
                pieces = fill(source, block, data)
                write_from(files.fd(chunk.path), data, chunk.offset + block.start, plan.dst.root / chunk.path)
                crc = checksum(block, pieces, data)
                with lock:
                    sources.note(pieces)
                    written.add((chunk.path, chunk.offset), block.start, block.nbytes, crc)
                    if progress:
                        progress(block.nbytes)

            yield copy

    work(blocks(plan), copier, jobs)
    scrub(sources, lock, jobs)
    chunks = (target.chunk for target in plan.targets)
    places = {(chunk.path, chunk.offset): written.whole((chunk.path, chunk.offset), chunk.length) for chunk in chunks}
    checksums = {place: crc for place, crc in places.items() if crc is not None}
    return Copied(checksums, sources.checked_bytes, sources.unchecked_bytes)


def compare(plan: Plan, *, jobs: int | None = None) -> frozenset[str]:
    """The names of the tensors whose bytes differ between the two layouts of a plan. Writes nothing."""
    sources = Sources(plan)
    different: set[str] = set()
    lock = threading.Lock()

    @contextmanager
    def comparer() -> Iterator[Callable[[Block], None]]:
        ours, theirs = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
        with Gatherer(plan.src.root) as source, Gatherer(plan.dst.root) as other:

            def check(block: Block) -> None:
                chunk = block.target.chunk
                pieces = fill(source, block, ours[: block.nbytes])
                other.fill([(chunk, block.box)], block.box, chunk.dtype, theirs[: block.nbytes])
                with lock:
                    sources.note(pieces)
                    if bytes(ours[: block.nbytes]) != bytes(theirs[: block.nbytes]):
                        different.add(block.target.name)

            yield check

    work(blocks(plan), comparer, jobs)
    scrub(sources, lock, jobs)
    return frozenset(different)


def blocks(plan: Plan) -> Iterator[Block]:
    """The plan cut into blocks of bounded size, in destination order."""
    for target in plan.targets:
        itemsize = max(target.chunk.dtype.itemsize, *(copy.src.dtype.itemsize for copy in target.copies))
        index = BoxIndex([copy.region for copy in target.copies])
        for box in cut(target.chunk.box, BLOCK_BYTES // itemsize):
            yield Block(target, box, tuple((target.copies[i].src, shared) for i, shared in index.meeting(box)))


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


class Sources:
    """The source chunks of a plan, and which of them have been read whole and found to have the CRC-32 recorded."""

    def __init__(self, plan: Plan) -> None:
        self.root = plan.src.root
        self._names = {_place(copy.src): target.name for target in plan.targets for copy in target.copies}
        chunks = {_place(copy.src): copy.src for copy in plan.copies}
        self._waiting = {place: chunk for place, chunk in chunks.items() if chunk.crc32 is not None}
        self._read: Checksums[Place] = Checksums()
        self.unchecked_bytes = sum(chunk.length for chunk in chunks.values() if chunk.crc32 is None)
        self.checked_bytes = 0

    def note(self, pieces: Iterable[Piece]) -> None:
        """Account for what was read; compare the CRC-32 of each chunk that is whole with this."""
        for piece in pieces:
            place = _place(piece.chunk)
            chunk = self._waiting.get(place)
            if chunk is None:
                continue
            self._read.add(place, piece.start, piece.length, piece.crc)
            found = self._read.whole(place, chunk.length)
            if found is not None:
                self._compare(place, chunk, found)

    def _compare(self, place: Place, chunk: Chunk, found: int) -> None:
        if found != chunk.crc32:
            raise Corrupt(
                f"the {chunk.length} bytes at {chunk.offset} are damaged: "
                f"their CRC-32 is {found:08x}, recorded is {chunk.crc32:08x}",
                path=self.root / chunk.path,
                tensor=self._names[place],
                hint="the file changed after it was written: restore it from a copy, or use another checkpoint",
            )
        self.checked_bytes += chunk.length
        del self._waiting[place]

    def unfinished(self) -> list[Chunk]:
        """The chunks with a CRC-32 of which not every byte was read, or not in one piece."""
        return list(self._waiting.values())

    def forget(self, chunk: Chunk) -> None:
        """Begin a chunk anew."""
        self._read.forget(_place(chunk))


def _place(chunk: Chunk) -> Place:
    return chunk.path, chunk.offset


def scrub(sources: Sources, lock: threading.Lock, jobs: int | None) -> None:
    """Read the chunks that were not read whole once more, from end to end, to compare their CRC-32."""

    @contextmanager
    def scrubber() -> Iterator[Callable[[Chunk], None]]:
        with Gatherer(sources.root) as source:

            def read(chunk: Chunk) -> None:
                starts = range(0, chunk.length, BLOCK_BYTES)
                pieces = [source.read(chunk, start, min(BLOCK_BYTES, chunk.length - start)) for start in starts]
                with lock:
                    sources.forget(chunk)
                    sources.note(pieces)

            yield read

    work(sources.unfinished(), scrubber, jobs)


def work(units: Iterable[Unit], worker: Worker[Unit], jobs: int | None) -> None:
    """Let `jobs` threads take units, each when it is done with the one before. The first error ends the work."""
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

    threads = [threading.Thread(target=run, daemon=True) for _ in range(jobs or default_jobs())]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C: the others finish their block first
        errors.insert(0, error)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def default_jobs() -> int:
    """Threads to use where nobody said: enough to keep a disk busy, no more than there are cores."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
