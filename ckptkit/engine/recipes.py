"""Shared parts of recipes: the dtypes that they compute in, and the rounding to the stored dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.layout.box import Box
from ckptkit.layout.casting import cast
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand

Array = NDArray[Any]
FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]


class Taken:
    """The recipe of a tensor that is a copy of another tensor, from another source or with another name."""

    def __init__(self, operand: Operand) -> None:
        self.operands = (operand,)

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the elements of a box unchanged."""
        return blocks[0], False


def working_dtype(dtype: DType) -> DType:
    """Return the dtype in which updates of a tensor of `dtype` are computed."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def as_stored(values: Array, src: DType, dst: DType) -> memoryview:
    """Return values of dtype `src`, rounded once to `dst`, as row-major bytes."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if src == dst:
        return flat.data.cast("B")
    rounded = np.empty(len(flat), f"u{dst.itemsize}")
    cast(flat, src, dst, rounded)
    return rounded.data.cast("B")
