"""Count the kinds of values in each tensor of a layout: NaN, infinite, zero, and the range of the finite ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ckptkit.engine.blocks import Block, blocks_of_plan
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.visit import Pieces, Progress, Worker, visit_blocks
from ckptkit.layout import Layout
from ckptkit.layout.counting import Count, count_values
from ckptkit.layout.plan import Plan, in_file_order, self_copy_target


class Tally:
    """Counts of tensors, merged in the order of the blocks, so that one checkpoint always gives the same numbers."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = {name: Count() for name in names}
        self._expected: deque[Block] = deque()
        self._early: dict[int, Count] = {}  # by id() of the block

    def track_order(self, blocks_in_order: Iterable[Block]) -> Iterator[Block]:
        for block in blocks_in_order:
            self._expected.append(block)
            yield block

    def add_count(self, block: Block, count: Count) -> None:
        """Add the count of a block, or store it until the counts of all earlier blocks are there."""
        self._early[id(block)] = count
        while self._expected and id(self._expected[0]) in self._early:
            first = self._expected.popleft()
            name = first.target.name
            self.counts[name] = self.counts[name].merge(self._early.pop(id(first)))


def count_values_by_tensor(
    layout: Layout, *, jobs: int | None = None, progress: Progress | None = None
) -> dict[str, Count]:
    """Return the counts of each tensor of a layout, computed with `jobs` threads.

    Verifies every chunk that has a recorded CRC-32. `progress` receives the bytes read, from one thread at a time.
    Raises `Corrupt` where bytes are missing or a CRC-32 differs, and `Usage` for a layout that has not been located.
    """
    chunks = ((name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks if chunk.box.numel)
    plan = Plan(layout, layout, in_file_order(self_copy_target(name, chunk) for name, chunk in chunks))
    sources = Sources(plan, Ledger())
    tally = Tally(layout.tensors)

    def count_block(worker: Worker, block: Block) -> Count:
        return count_values(worker.read_input(block), block.target.chunk.dtype)

    def record(block: Block, fresh: Count, pieces: Pieces) -> None:
        sources.record_reads(pieces)
        tally.add_count(block, fresh)
        if progress:
            progress(block.nbytes)

    visit_blocks(
        plan,
        count_block,
        record,
        jobs,
        sums=sources.is_awaiting_comparison,
        among=tally.track_order(blocks_of_plan(plan)),
    )
    reread_unchecked_ranges(sources, jobs)
    return tally.counts
