"""Averaging: worker threads that fill a destination with the weighted mean of several sources. Names no format.

A float of 16 bits or more is the sum of weight times number, in float64 and in the order of the sources, and is rounded
when all are added. One that is the same in all sources to the last bit stays what it is. Elements of other dtypes are
not added up: they are those of the last source. A worker holds a block of a few buffers, and one more for each source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.engine.gather import Gatherer
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.sources import Sources, place_of
from ckptkit.engine.workers import Step, work
from ckptkit.errors import CkptError, Unsupported
from ckptkit.files.crc32 import crc32
from ckptkit.files.file import Opened
from ckptkit.layout import Chunk, Piece
from ckptkit.plan import Plan, Target
from ckptkit.tensors.blocks import cut, span_of
from ckptkit.tensors.box import Box, BoxIndex
from ckptkit.tensors.casting import cast
from ckptkit.tensors.dtypes import DTYPES, DType

Array = NDArray[Any]
Parts = tuple[tuple[Chunk, Box], ...]  # source chunks, with what each shares with a block
Gather = Callable[[int, DType, memoryview], None]  # fills a buffer with a block's elements from a source

_NUMEL = 1 << 17  # elements of a block: as float64 they stay in a core's cache
_LARGEST = 16  # bytes of an element
_WIDE = DTYPES["float64"]


@dataclass(frozen=True, slots=True)
class Term:
    """A source of a mean: how the destination would be made of it alone, and its weight."""

    plan: Plan
    weight: float


@dataclass(frozen=True, slots=True)
class Filled:
    """What was read of each source, and written; and the tensors taken from the last source that differ from others."""

    ledgers: tuple[Ledger, ...]
    taken: frozenset[str]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a chunk to be made of tensor `name`, and what it is made of in each source."""

    name: str
    chunk: Chunk
    box: Box
    parts: tuple[Parts, ...]

    @property
    def start(self) -> int:
        """Its first byte, counted from the start of the chunk."""
        return span_of(self.box, self.chunk.box, None).start * self.chunk.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Its bytes in the destination."""
        return self.box.numel * self.chunk.dtype.itemsize


def fill(terms: Sequence[Term], *, jobs: int | None = None, progress: Callable[[int], None] | None = None) -> Filled:
    """Fill the one destination that all terms have, which is allocated already, with `jobs` threads.

    Each source chunk that is read whole is compared with the CRC-32 recorded for it; `settle` does the rest. Raises
    `Unsupported` for a tensor that differs among sources and has no mean. `progress` is told of bytes written, by one
    thread at a time.
    """
    written = Ledger().written
    ledgers = tuple(Ledger(written=written) for _ in terms)
    sources = [Sources(term.plan, ledger) for term, ledger in zip(terms, ledgers, strict=True)]
    root = terms[0].plan.dst.root
    lock = threading.Lock()
    taken: set[str] = set()

    @contextmanager
    def filler() -> Iterator[Step[Block]]:
        mean = Mean([term.weight for term in terms])
        with ExitStack() as stack, Opened(root, writable=True) as files:
            gatherers = [stack.enter_context(Gatherer(term.plan.src.root)) for term in terms]

            def make(block: Block) -> None:
                pieces: list[list[Piece]] = []
                data, is_taken = mean.of(block, partial(gather, block, gatherers, pieces))
                files[block.chunk.path].write_at(data, block.chunk.offset + block.start)
                with lock:
                    for source, seen in zip(sources, pieces, strict=True):
                        source.note(seen)
                    written.add(place_of(block.chunk), block.start, block.nbytes, crc32(data))
                    if is_taken:
                        taken.add(block.name)
                    if progress:
                        progress(block.nbytes)

            yield make

    work(blocks(terms), filler, jobs, *(term.plan.src.root for term in terms))
    return Filled(ledgers, frozenset(taken))


def blocks(terms: Sequence[Term]) -> Iterator[Block]:
    """The destination cut into blocks, in its order; each with what it is made of in every source."""
    for targets in zip(*(term.plan.targets for term in terms), strict=True):
        indices = [BoxIndex([copy.region for copy in target.copies]) for target in targets]
        chunk = targets[0].chunk
        for box in cut(chunk.box, _NUMEL):
            parts = tuple(parts_of(target, index, box) for target, index in zip(targets, indices, strict=True))
            yield Block(targets[0].name, chunk, box, parts)


def parts_of(target: Target, index: BoxIndex, box: Box) -> Parts:
    """What a box of a target is made of."""
    return tuple((target.copies[i].src, shared) for i, shared in index.meeting(box))


def gather(
    block: Block, gatherers: Sequence[Gatherer], pieces: list[list[Piece]], number: int, dtype: DType, out: memoryview
) -> None:
    """Put a block's elements from source `number` into `out`, as `dtype`; an error names the tensor."""
    try:
        pieces.append(gatherers[number].fill(block.parts[number], block.box, dtype, out))
    except CkptError as error:
        raise error.blame(tensor=block.name) from None


class Mean:
    """The weighted mean of blocks, one after the other, in buffers that it keeps. Belongs to one thread."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._first, self._other, self._sum, self._out = (memoryview(bytearray(_NUMEL * _LARGEST)) for _ in range(4))

    def of(self, block: Block, gather: Gather) -> tuple[memoryview, bool]:
        """A block's bytes, until the next is asked for; and whether they are those of the last source, unlike others'.

        `gather` is called once for each source, in order.
        """
        if block.chunk.dtype.kind == "float":
            return self._weighted(block, gather), False
        return self._last(block, gather)

    def _weighted(self, block: Block, gather: Gather) -> memoryview:
        room = block.box.numel * _WIDE.itemsize
        first, other, total = (buffer[:room] for buffer in (self._first, self._other, self._sum))
        number, more, mean = (np.frombuffer(buffer, np.float64) for buffer in (first, other, total))
        is_same = np.ones(block.box.numel, bool)
        gather(0, _WIDE, first)
        np.multiply(number, self._weights[0], out=mean)
        with np.errstate(invalid="ignore", over="ignore"):
            for i, weight in enumerate(self._weights[1:], 1):
                gather(i, _WIDE, other)
                is_same &= number.view(np.int64) == more.view(np.int64)
                more *= weight
                mean += more
        np.copyto(mean, number, where=is_same)
        out = self._out[: block.nbytes]
        narrow(block, mean, out)
        return out

    def _last(self, block: Block, gather: Gather) -> tuple[memoryview, bool]:
        first, other = self._first[: block.nbytes], self._other[: block.nbytes]
        gather(0, block.chunk.dtype, first)
        is_same = True
        for number in range(1, len(self._weights)):
            gather(number, block.chunk.dtype, other)
            is_same = is_same and np.array_equal(np.frombuffer(first, np.uint8), np.frombuffer(other, np.uint8))
        if not is_same and block.chunk.dtype.kind not in ("int", "bool"):
            message = f"no mean of {block.chunk.dtype} is known, and it is not the same in all sources"
            raise Unsupported(message, tensor=block.name, hint="leave it out, or average before it is quantized")
        return (first if len(self._weights) == 1 else other), not is_same


def narrow(block: Block, values: Array, out: memoryview) -> None:
    """Round numbers to the dtype of a block; an error names the tensor."""
    dtype = block.chunk.dtype
    try:
        cast(values, _WIDE, dtype, np.frombuffer(out, f"u{dtype.itemsize}"))
    except CkptError as error:
        raise error.blame(tensor=block.name) from None
