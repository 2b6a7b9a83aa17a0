"""Read one box of one tensor into memory."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from threading import Lock

from ckptkit.engine.blocks import BLOCK_BYTES, Block
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import apply_recipe, reread_unchecked_ranges
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.visit import Worker, visit_blocks
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.plan import Plan, Recipe, targets_for

_LEAST_MAPPED = 2 * BLOCK_BYTES  # smaller buffers are often used once, and malloc has their pages ready


class SharedRuns:
    """The bytes that several reads got of byte ranges that no single read completes.

    An example is one chunk with many experts. A range is verified with its CRC-32 once the reads together have read all
    of it. Thread-safe.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.lock = Lock()


def empty_buffer(nbytes: int) -> bytearray | mmap:
    """Return a buffer. Large ones are mapped: Python's lock is held while a bytearray is filled with zeros."""
    try:
        return mmap(-1, nbytes, MAP_PRIVATE | MAP_ANONYMOUS) if nbytes >= _LEAST_MAPPED else bytearray(nbytes)
    except OSError as error:
        raise MemoryError from error


def read_box(
    layout: Layout,
    name: str,
    box: Box,
    *,
    other_layouts: tuple[Layout, ...] = (),
    recipe: Recipe | None = None,
    shared: SharedRuns | None = None,
    jobs: int | None = None,
) -> memoryview:
    """Return the elements of `box` of a tensor: row-major, in its dtype.

    A `recipe` computes them from tensors of all layouts. Reads only the bytes it needs, with `jobs` threads. Verifies
    each chunk that is read completely and has a CRC-32, and every chunk if all of the tensor is read; `Corrupt` names
    one that differs. A byte range of several tensors is verified once reads with the same `shared` have read all of it.
    Raises `Usage` for a layout that has not been located.
    """
    spec = layout.tensors[name].spec
    wanted = Chunk(box, "", 0, box.numel * spec.dtype.itemsize, spec.dtype)
    read_from = (layout, *other_layouts) if recipe else (layout,)
    plan = Plan(
        layout, layout, tuple(targets_for(name, StoredTensor(spec, (wanted,)), read_from, recipe)), read_from[1:]
    )
    is_whole = box == full_box(spec.shape)
    sources = Sources(plan, is_all=not is_whole)
    data = memoryview(empty_buffer(wanted.length))

    def read_block(worker: Worker, block: Block) -> None:
        start = block.target.chunk.offset + block.start
        target = data[start : start + block.nbytes]
        if recipe is None:
            worker.read_input(block, out=target)
        else:
            target[:] = apply_recipe(recipe, worker, block)[0]

    jobs = 1 if len(data) <= BLOCK_BYTES else jobs
    visit_blocks(
        plan,
        read_block,
        lambda _block, _seen, pieces: sources.record_reads(pieces),
        jobs,
        sums=sources.is_awaiting_comparison,
    )
    if is_whole:
        reread_unchecked_ranges(sources, jobs)
        if shared is not None:
            with shared.lock:
                sources.move_shared_reads_to(shared.ledger)
    return data
