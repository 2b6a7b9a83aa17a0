"""Reading: a box of one tensor into memory, and no more of it. Names no format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.engine.copy import fill, scrub
from ckptkit.engine.gather import BLOCK_BYTES, Gatherer
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.sources import Sources
from ckptkit.engine.units import Block, blocks
from ckptkit.engine.workers import Step, work
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.plan import Plan, join
from ckptkit.tensors.box import Box, whole


def read(layout: Layout, name: str, box: Box, *, jobs: int | None = None) -> bytearray:
    """The elements of `box` of a tensor whose chunks have been located: row-major, as they are stored.

    Reads their bytes only, with `jobs` threads. A chunk that is read whole is compared with the CRC-32 recorded for it,
    and so is every chunk where all of the tensor is read; `Corrupt` names one that differs.
    """
    tensor = layout.tensors[name]
    wanted = Chunk(box, "", 0, box.numel * tensor.spec.dtype.itemsize, tensor.spec.dtype)
    plan = Plan(layout, layout, tuple(join(name, tensor, StoredTensor(tensor.spec, (wanted,)), layout)))
    sources = Sources(plan, Ledger())
    data = bytearray(wanted.length)
    out = memoryview(data)

    @contextmanager
    def reader() -> Iterator[Step[Block]]:
        with Gatherer(layout.root) as source:

            def read_block(block: Block) -> None:
                pieces = fill(source, block, out[block.start : block.start + block.nbytes])
                with sources.lock:
                    sources.note(pieces)

            yield read_block

    jobs = 1 if len(data) <= BLOCK_BYTES else jobs
    work(blocks(plan), reader, jobs, layout.root)
    if box == whole(tensor.spec.shape):
        scrub(sources, jobs)
    return data
