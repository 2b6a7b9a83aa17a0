"""Read a box of one tensor into memory, and no more of it. Names no format."""

from __future__ import annotations

from ckptkit.engine.blocks import Block
from ckptkit.engine.copy import scrub
from ckptkit.engine.gather import BLOCK_BYTES
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.sources import Sources
from ckptkit.engine.visit import Worker, visit
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.layout.plan import Plan, join
from ckptkit.tensors.box import Box, whole


def read(layout: Layout, name: str, box: Box, *, jobs: int | None = None) -> bytearray:
    """Return the elements of `box` of a tensor: row-major, in its dtype.

    Reads their bytes only, with `jobs` threads. A chunk that is read whole is compared with the CRC-32 recorded for it,
    and so is every chunk where all of the tensor is read; `Corrupt` names one that differs. Raises `Usage` for a layout
    that has not been located.
    """
    spec = layout.tensors[name].spec
    wanted = Chunk(box, "", 0, box.numel * spec.dtype.itemsize, spec.dtype)
    plan = Plan(layout, layout, tuple(join(name, StoredTensor(spec, (wanted,)), (layout,))))
    sources = Sources(plan, Ledger())
    data = bytearray(wanted.length)
    out = memoryview(data)

    def look(worker: Worker, block: Block) -> None:
        start = block.target.chunk.offset + block.start
        worker.read(block, out=out[start : start + block.nbytes])

    jobs = 1 if len(data) <= BLOCK_BYTES else jobs
    visit(plan, look, lambda _block, _seen, pieces: sources.note(pieces), jobs)
    if box == whole(spec.shape):
        scrub(sources, jobs)
    return data
