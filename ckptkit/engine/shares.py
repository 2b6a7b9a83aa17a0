"""Share a plan among processes, unit by unit."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby, islice

from ckptkit.engine.blocks import BLOCK_BYTES, Block, blocks_of_target
from ckptkit.engine.ledger import Ledger
from ckptkit.layout import Blob, Chunk, Layout
from ckptkit.layout.plan import Plan, filled_entries_in_order

UNIT_BYTES = 1 << 28  # of each file in work, the most that is done again after an interruption


@dataclass(frozen=True, slots=True)
class Share:
    """The consecutive units of a plan that worker `number` of `count` does; each gets equally many, or one more."""

    number: int = 0
    count: int = 1

    def unit_bytes(self, nbytes: int) -> int:
        """Return the unit size for a destination of `nbytes`: small enough that each worker gets about four units."""
        return max(BLOCK_BYTES, min(UNIT_BYTES, -(-nbytes // (4 * self.count))))

    def unit_indices(self, nbytes: int) -> range:
        units = -(-nbytes // self.unit_bytes(nbytes))
        return range(-(-self.number * units // self.count), -(-(self.number + 1) * units // self.count))


WHOLE = Share()


class UnfinishedUnits:
    """The units of a share that are still to be written, each with a ledger of what was.

    A block belongs to the unit that its first byte lies in. A unit is finished when all its bytes are written, also
    those of a block that began in the unit before it.
    """

    def __init__(self, plan: Plan, share: Share, done: Container[int]) -> None:
        self._unit_bytes = nbytes = share.unit_bytes(plan.destination_nbytes)
        starts = [*accumulate((target.chunk.length for target in plan.targets), initial=plan.before)]
        end = starts[-1]
        self._starts = dict(zip(map(id, plan.targets), starts, strict=False))  # by identity: a name has several
        self._own = share.unit_indices(plan.destination_nbytes)
        self._ledgers = {unit: Ledger() for unit in self._own if unit not in done}
        self._missing = {
            unit: min((unit + 1) * nbytes, end) - max(unit * nbytes, plan.before) for unit in self._ledgers
        }

    def is_own(self, block: Block) -> bool:
        """Return whether the block's unit is of this share, finished or not."""
        return self._destination_offset_of(block) // self._unit_bytes in self._own

    def find_ledger(self, block: Block) -> Ledger | None:
        """Return the ledger of a block's unit; None if it is finished, or another worker's."""
        return self._ledgers.get(self._destination_offset_of(block) // self._unit_bytes)

    def pop_finished(self, block: Block) -> Iterator[tuple[int, Ledger]]:
        """Yield the units that are finished now that a block is written, here or elsewhere."""
        start = self._destination_offset_of(block)
        stop = start + block.nbytes
        for unit in range(start // self._unit_bytes, -(-stop // self._unit_bytes)):
            if unit in self._missing:
                first = unit * self._unit_bytes
                self._missing[unit] -= min(stop, first + self._unit_bytes) - max(start, first)
                if not self._missing[unit]:
                    del self._missing[unit]
                    yield unit, self._ledgers.pop(unit)

    def _destination_offset_of(self, block: Block) -> int:
        return self._starts[id(block.target)] + block.start


def interleave_blocks_of_files(plan: Plan, file_count: int) -> Iterator[Block]:
    """Yield the blocks of a plan in the order of each file, of `file_count` files in turns.

    A file system lets only one thread write into a file at a time, so threads write into several.
    """
    by_file = [[*targets] for _, targets in groupby(plan.targets, lambda target: target.chunk.path)]
    waiting = (chain.from_iterable(map(partial(blocks_of_target, plan), targets)) for targets in by_file)
    turns = deque(islice(waiting, file_count))
    while turns:
        blocks = turns.popleft()
        block = next(blocks, None)
        if block is None:
            turns.extend(islice(waiting, 1))
        else:
            yield block
            turns.append(blocks)


def narrow_to_share(dst: Layout, src: Layout, share: Share) -> tuple[Layout, int, int]:
    """Return the part of a destination that a share fills, and the bytes before and after. Shares may share a chunk."""
    data = filled_entries_in_order(dst, src)
    total = sum(nbytes for _, nbytes, _, _ in data)
    units, unit = share.unit_indices(total), share.unit_bytes(total)
    chunks: dict[str, list[Chunk]] = {}
    blobs: dict[str, Blob] = {}
    end = before = within = 0
    for _, nbytes, name, stored in data:
        start, end = end, end + nbytes
        if end <= units.start * unit:
            before = end
        elif start < units.stop * unit:
            within += nbytes
            if isinstance(stored, Blob):
                blobs[name] = stored
            else:
                chunks.setdefault(name, []).append(stored)
    tensors = {name: replace(dst.tensors[name], chunks=tuple(own)) for name, own in chunks.items()}
    return replace(dst, tensors=tensors, blobs=blobs), before, total - before - within
