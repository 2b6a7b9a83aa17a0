"""Share a plan among processes, unit by unit. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from ckptkit.engine.blocks import Block, blocks_of
from ckptkit.engine.gather import BLOCK_BYTES
from ckptkit.plan import Plan

UNIT_BYTES = 1 << 28  # at most so much is done again after an interruption


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a plan that worker `number` of `count` does: a run of its units, as equal as they can be."""

    number: int = 0
    count: int = 1

    def unit_bytes(self, plan: Plan) -> int:
        """Return the bytes of the destination in a unit: few enough that there are some for each worker."""
        return max(BLOCK_BYTES, min(UNIT_BYTES, -(-plan.nbytes // (4 * self.count))))

    def has(self, unit: int, plan: Plan) -> bool:
        """Return True if the unit is in this share."""
        units = -(-plan.nbytes // self.unit_bytes(plan))
        return unit * self.count // units == self.number


WHOLE = Share()


def units_of(plan: Plan, nbytes: int) -> Iterator[tuple[int, Iterator[Block]]]:
    """Yield the number of each unit, `nbytes` of the destination whatever its files and targets, and its blocks."""
    ends = accumulate(target.chunk.length for target in plan.targets)
    placed = (
        (end - target.chunk.length + block.start, block)
        for target, end in zip(plan.targets, ends, strict=True)
        for block in blocks_of(plan, target)
    )
    for unit, group in groupby(placed, lambda pair: pair[0] // nbytes):
        yield unit, (block for _, block in group)
