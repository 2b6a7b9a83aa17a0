"""Average blocks: the weighted mean of several sources.

A float of 16 bits or more is the sum of weight times element, in float64 and in the order of the sources, rounded once
at the end. An element that is bitwise equal in all sources stays unchanged. Elements of other dtypes are not averaged:
they come from the last source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Box
from ckptkit.layout.casting import cast
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand

_WIDE = DTYPES["float64"]


class Mean:
    """The recipe of a tensor that is the weighted mean of the tensors of this name, one weight per source."""

    def __init__(self, name: str, dtype: DType, weights: Sequence[float]) -> None:
        reads_as = _WIDE if dtype.kind == "float" else dtype
        self.operands = tuple(Operand(number, name, reads_as) for number in range(len(weights)))
        self._weights = weights

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the mean as `dtype`.

        Of other dtypes return the last source's elements, and True if the sources differ. Raises `Unsupported` for
        elements that differ and cannot be averaged.
        """
        if dtype.kind == "float":
            return mean(dtype, blocks, self._weights), False
        return last_block(dtype, blocks)


def mean(dtype: DType, blocks: Sequence[memoryview], weights: Sequence[float]) -> memoryview:
    """Return the weighted mean of float64 blocks, rounded to `dtype`. Overwrites all blocks but the first."""
    first, *rest = (np.frombuffer(block, np.float64) for block in blocks)
    is_same = np.ones(len(first), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        total = first * weights[0]
        for numbers, weight in zip(rest, weights[1:], strict=True):
            is_same &= first.view(np.int64) == numbers.view(np.int64)
            total += np.multiply(numbers, weight, out=numbers)
    np.copyto(total, first, where=is_same)
    narrow = np.empty(len(total), f"u{dtype.itemsize}")
    cast(total, _WIDE, dtype, narrow)
    return narrow.data.cast("B")


def last_block(dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
    """Return the last of several blocks, and whether any other block differs."""
    first, *rest = (np.frombuffer(block, np.uint8) for block in blocks)
    is_same = all(np.array_equal(first, other) for other in rest)
    if not is_same and dtype.kind not in ("int", "bool"):
        message = f"ckptkit cannot average {dtype}, and the values differ between the sources"
        raise Unsupported(message, hint="drop it with --exclude, or average before you quantize")
    return blocks[-1], not is_same
