"""Share a plan among processes, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from ckptkit.engine.blocks import BLOCK_BYTES, Block, blocks_of_target
from ckptkit.layout import Blob, Chunk, Layout
from ckptkit.layout.plan import Plan, filled_entries_in_order

UNIT_BYTES = 1 << 28  # the most that is done again after an interruption


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


def blocks_by_unit(plan: Plan, unit_bytes: int) -> Iterator[tuple[int, Iterator[Block]]]:
    """Yield the index of each unit and its blocks. A unit is `unit_bytes` of the destination, across files."""
    starts = accumulate((target.chunk.length for target in plan.targets), initial=plan.before)
    placed = (
        (start + block.start, block)
        for target, start in zip(plan.targets, starts, strict=False)
        for block in blocks_of_target(plan, target)
    )
    for unit, group in groupby(placed, lambda pair: pair[0] // unit_bytes):
        yield unit, (block for _, block in group)


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
