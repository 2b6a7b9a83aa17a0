"""Average blocks: the weighted mean of several sources.

A float of 16 bits or more is the sum of weight times number, in float64 and in the order of the sources, and is rounded
when all are added. One that is the same in all sources to the last bit stays what it is. Elements of other dtypes are
not added up: they are those of the last source.
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
    """The recipe of a tensor that is the mean by `weights`, one for each source, of those of its name."""

    def __init__(self, name: str, dtype: DType, weights: Sequence[float]) -> None:
        reads_as = _WIDE if dtype.kind == "float" else dtype
        self.operands = tuple(Operand(number, name, reads_as) for number in range(len(weights)))
        self._weights = weights

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the mean as `dtype`, or the last source's elements, with True if those of others differ.

        Raises `Unsupported` for elements that differ and have no mean.
        """
        if dtype.kind == "float":
            return mean(dtype, blocks, self._weights), False
        return last(dtype, blocks)


def mean(dtype: DType, blocks: Sequence[memoryview], weights: Sequence[float]) -> memoryview:
    """Return the weighted mean of blocks of float64, rounded to `dtype`. Uses up all blocks but the first."""
    first, *rest = (np.frombuffer(block, np.float64) for block in blocks)
    is_same = np.ones(len(first), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        total = first * weights[0]
        for numbers, weight in zip(rest, weights[1:], strict=True):
            is_same &= first.view(np.int64) == numbers.view(np.int64)
            total += np.multiply(numbers, weight, out=numbers)
    np.copyto(total, first, where=is_same)
    rounded = np.empty(len(total), f"u{dtype.itemsize}")
    cast(total, _WIDE, dtype, rounded)
    return rounded.data.cast("B")


def last(dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
    """Return the last of some blocks, and whether any of the others differs."""
    first, *rest = (np.frombuffer(block, np.uint8) for block in blocks)
    is_same = all(np.array_equal(first, other) for other in rest)
    if not is_same and dtype.kind not in ("int", "bool"):
        message = f"ckptkit cannot average {dtype}, and the values differ between the sources"
        raise Unsupported(message, hint="drop it with --exclude, or average before you quantize")
    return blocks[-1], not is_same
