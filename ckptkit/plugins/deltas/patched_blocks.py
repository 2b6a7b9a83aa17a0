"""Make the blocks of a tensor that a chain of deltas changes: those before, with the new values in their places."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ckptkit.layout.blocks import span_of
from ckptkit.layout.box import Box, Shape, whole
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand
from ckptkit.plugins.deltas.chain import DeltaChain
from ckptkit.plugins.deltas.changes import Array, Changes

_KEPT = 4  # tensors whose changes are in memory: threads work at neighbors


class LoadedChanges:
    """The changes of a chain by tensor, loaded when they are first asked for; the last few are kept."""

    def __init__(self, chain: DeltaChain) -> None:
        self._chain = chain
        self._lock = threading.Lock()
        self._kept: dict[str, Changes | None] = {}

    def __getitem__(self, name: str) -> Changes | None:
        with self._lock:
            if name not in self._kept:
                while len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[name] = self._chain.load(name)
            return self._kept[name]


class Patched:
    """The recipe of a tensor with some elements changed. `shape` is that of the boxes that are asked for."""

    def __init__(self, operand: Operand, name: str, shape: Shape, changes: LoadedChanges) -> None:
        self.operands = (operand,)
        self._name, self._box, self._changes = name, whole(shape), changes

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box, a run of the tensor's elements, as they are after the change."""
        changes = self._changes[self._name]
        if changes is not None:
            put_into(blocks[0], span_of(box, self._box, None).start, changes, dtype.itemsize)
        return blocks[0], False


def put_into(block: memoryview, first: int, changes: Changes, itemsize: int) -> int:
    """Put the new values into a block that begins at element `first`, and return how many there are."""
    count = len(block) // itemsize
    low, high = np.searchsorted(changes.positions, np.array([first, first + count], changes.positions.dtype))
    if high > low:
        elements: Array = np.frombuffer(block, changes.values.dtype)
        elements[changes.positions[low:high] - first] = changes.values[low:high]
    return int(high - low)
