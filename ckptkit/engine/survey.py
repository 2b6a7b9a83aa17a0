"""Count the kinds of values in each tensor of a layout: NaN, infinite, zero, and the range of the finite ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ckptkit.engine.blocks import Block, blocks_of_plan
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.visit import Pieces, Progress, Worker, visit_blocks
from ckptkit.layout import Layout
from ckptkit.layout.counting import Count, count_values
from ckptkit.layout.plan import Plan, in_file_order, self_copy_target


def count_values_by_tensor(
    layout: Layout, *, jobs: int | None = None, progress: Progress | None = None
) -> dict[str, Count]:
    """Return the counts of each tensor of a layout, computed with `jobs` threads.

    Verifies every chunk that has a recorded CRC-32. `progress` receives the bytes read, from one thread at a time.
    Raises `Corrupt` where bytes are missing or a CRC-32 differs, and `Usage` for a layout that has not been located.
    """
    chunks = ((name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks if chunk.box.numel)
    plan = Plan(layout, layout, in_file_order(self_copy_target(name, chunk) for name, chunk in chunks))
    sources = Sources(plan)
    counts = {name: Count() for name in layout.tensors}
    expected: deque[Block] = deque()  # the blocks whose counts are not merged yet, in the order of the plan
    early: dict[int, Count] = {}  # the counts of those that came before their turn, by id() of the block

    def blocks_in_order() -> Iterator[Block]:
        for block in blocks_of_plan(plan):
            expected.append(block)
            yield block

    def count_block(worker: Worker, block: Block) -> Count:
        return count_values(worker.read_input(block), block.target.chunk.dtype)

    def record(block: Block, fresh: Count, pieces: Pieces) -> None:
        sources.record_reads(pieces)
        early[id(block)] = fresh
        # merged in the order of the blocks, so that one checkpoint always gives the same numbers
        while expected and id(expected[0]) in early:
            first = expected.popleft()
            counts[first.target.name] = counts[first.target.name].merge(early.pop(id(first)))
        if progress:
            progress(block.nbytes)

    visit_blocks(plan, count_block, record, jobs, sums=sources.is_awaiting_comparison, among=blocks_in_order())
    reread_unchecked_ranges(sources, jobs)
    return counts
