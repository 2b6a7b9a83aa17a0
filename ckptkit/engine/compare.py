"""Compares layouts: worker threads that read both, block by block, and measure what is not the same. Names no format.

A worker holds a block of either side. Blocks that are equal cost no more than being read: numpy is not even imported
before two differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptkit.engine.copy import fill, scrub
from ckptkit.engine.gather import BLOCK_BYTES, Gatherer
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.sources import Sources
from ckptkit.engine.units import Block, blocks
from ckptkit.engine.workers import Step, work
from ckptkit.errors import CkptError
from ckptkit.files.crc32 import Checksums, crc32
from ckptkit.layout import Chunk, Layout, Piece, StoredTensor
from ckptkit.plan import Copy, Plan, join, make_plan
from ckptkit.tensors.box import Box, whole
from ckptkit.tensors.distance import Distance, Tolerance
from ckptkit.tensors.dtypes import DType

Progress = Callable[[int], None]
Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found: the distance of each tensor that was measured, and how many bytes had a CRC-32 to compare with.

    Measured are the tensors that differ, or all where that was asked for.
    """

    distances: Mapping[str, Distance]
    checked_bytes: int

    @property
    def different(self) -> list[str]:
        """The names of the tensors that differ, in order."""
        return sorted(name for name, found in self.distances.items() if found.different)


def compare(
    a: Layout,
    b: Layout,
    *,
    tolerance: Tolerance | None = None,
    measure_all: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Hold two layouts against each other that have the same tensors, in the same shapes, with `jobs` threads.

    Their chunks have been located; the dtypes may differ where numbers can be measured. With `measure_all` equal
    tensors are measured too. Every chunk is compared with the CRC-32 recorded for it: `Corrupt` names one that differs.
    `progress` is told of bytes read, by one thread at a time.
    """
    plan = plan_comparison(a, b)
    comparer = Comparer(plan, tolerance, measure_all, progress)
    work(blocks(plan), comparer.worker, jobs, plan.src.root, plan.dst.root)
    scrub(comparer.ours, jobs)
    scrub(comparer.theirs, jobs)
    distances = complete(plan, comparer.distances, jobs)
    return Comparison(distances, comparer.ours.checked_bytes + comparer.theirs.checked_bytes)


def plan_comparison(a: Layout, b: Layout) -> Plan:
    """The plan by which each chunk of `b` is held against what lies in its place in `a`."""
    targets = [target for name, tensor in b.tensors.items() for target in join(name, a.tensors[name], tensor, a)]
    return Plan(a, b, tuple(sorted(targets, key=lambda target: (target.chunk.path, target.chunk.offset))))


def reverse(plan: Plan) -> Plan:
    """A plan that reads what the other would write."""
    targets = (replace(target, copies=(Copy(target.chunk.box, target.chunk, target.chunk),)) for target in plan.targets)
    return Plan(plan.dst, plan.src, tuple(targets))


class Comparer:
    """What is known while two layouts are compared; each worker thread adds to it."""

    def __init__(self, plan: Plan, tolerance: Tolerance | None, measure_all: bool, progress: Progress | None) -> None:
        self.plan = plan
        self.ours, self.theirs = Sources(plan, Ledger()), Sources(reverse(plan), Ledger())
        self.distances: dict[str, Distance] = {}
        self._tolerance = tolerance
        self._measure_all = measure_all
        self._progress = progress
        self._lock = threading.Lock()

    @contextmanager
    def worker(self) -> Iterator[Step[Block]]:
        """What a thread does with each block: read both sides, and measure them if they are not the same bytes."""
        buffers = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
        views = memoryview(buffers[0]), memoryview(buffers[1])
        with Gatherer(self.plan.src.root) as left, Gatherer(self.plan.dst.root) as right:

            def check(block: Block) -> None:
                name, chunk = block.target.name, block.target.chunk
                one, two = (layout.tensors[name].spec.dtype for layout in (self.plan.src, self.plan.dst))
                a, b = (view[: block.box.numel * dtype.itemsize] for view, dtype in zip(views, (one, two), strict=True))
                pieces = gather(left, name, block.parts, block.box, one, a)
                others = gather(right, name, [(chunk, block.box)], block.box, two, b)
                # memcmp without a copy; memoryviews compare themselves item by item
                is_same = one == two and buffers[0].startswith(b)
                found = None
                if self._measure_all or not is_same:
                    from ckptkit.tensors.measuring import measure

                    found = measure((a, one), (b, two), block.box, self._tolerance)
                self._note(name, pieces, others, found, len(a) + len(b))

            yield check

    def _note(self, name: str, ours: list[Piece], theirs: list[Piece], found: Distance | None, nbytes: int) -> None:
        with self._lock:
            self.ours.note(ours)
            self.theirs.note(theirs)
            if found is not None:
                self.distances[name] = self.distances.get(name, Distance()).merge(found)
            if self._progress:
                self._progress(nbytes)


def gather(
    source: Gatherer, name: str, parts: Iterable[tuple[Chunk, Box]], box: Box, dtype: DType, out: memoryview
) -> list[Piece]:
    """Put the elements of a box of tensor `name` into `out`; an error names the tensor."""
    try:
        return source.fill(parts, box, dtype, out)
    except CkptError as error:
        raise error.blame(tensor=name) from None


def complete(plan: Plan, distances: Mapping[str, Distance], jobs: int | None) -> dict[str, Distance]:
    """The distances with the size of all of `a`: of a tensor that is the same in part, only the rest was measured."""
    tensors = plan.src.tensors
    lacking = {
        name: tensors[name]
        for name, found in distances.items()
        if found.different and found.elements < tensors[name].spec.numel
    }
    sizes = dict.fromkeys(lacking, 0.0)

    def look(block: Block, data: memoryview) -> float:
        from ckptkit.tensors.measuring import size_of

        return size_of((data, block.target.chunk.dtype))

    def note(block: Block, size: float) -> None:
        sizes[block.target.name] += size

    visit(replace(plan.src, tensors=lacking), look, note, jobs)
    return {name: replace(found, size_a=sizes.get(name, found.size_a)) for name, found in distances.items()}


def fingerprints(layout: Layout, *, jobs: int | None = None, progress: Progress | None = None) -> dict[str, int]:
    """The CRC-32 of each tensor's elements in row-major order, however they are stored."""
    sums: Checksums[str] = Checksums()

    def look(_: Block, data: memoryview) -> int:
        return crc32(data)

    def note(block: Block, crc: int) -> None:
        sums.add(block.target.name, block.start, block.nbytes, crc)
        if progress:
            progress(block.nbytes)

    visit(layout, look, note, jobs)
    return {name: sums.whole(name, spec.nbytes) or 0 for name, spec in layout.specs.items()}


def visit(
    layout: Layout,
    look: Callable[[Block, memoryview], Seen],
    note: Callable[[Block, Seen], None],
    jobs: int | None,
) -> None:
    """Show every tensor to `look`, in row-major blocks; `note` is told of what it saw, by one thread at a time."""
    lock = threading.Lock()

    @contextmanager
    def visitor() -> Iterator[Step[Block]]:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with Gatherer(layout.root) as source:

            def step(block: Block) -> None:
                data = buffer[: block.nbytes]
                fill(source, block, data)
                seen = look(block, data)
                with lock:
                    note(block, seen)

            yield step

    work(blocks(in_one_piece(layout)), visitor, jobs, layout.root)


def in_one_piece(layout: Layout) -> Plan:
    """The plan by which each tensor would lie row-major and in one piece."""
    tensors = {
        name: StoredTensor(spec, (Chunk(whole(spec.shape), name, 0, spec.nbytes, spec.dtype),))
        for name, spec in layout.specs.items()
    }
    return make_plan(layout, replace(layout, tensors=tensors, blobs={}))
