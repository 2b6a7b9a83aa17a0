"""Count new values that are NaN, which some inference engines refuse."""

from __future__ import annotations

import numpy as np

from ckptkit.layout.small_floats import SMALL_FLOATS
from ckptkit.plugins.deltas.changes import Array
from ckptkit.words import count

_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}  # bit patterns; without the sign bit, NaN is greater than infinity


def count_nan(values: Array, dtype: str) -> int:
    """Return how many of the values, given as stored bits, are NaN."""
    if dtype in ("float32", "float64"):
        return int(np.isnan(values.view(dtype)).sum())
    if dtype in _INFINITY:
        return int(((values & 0x7FFF) > _INFINITY[dtype]).sum())
    if dtype in SMALL_FLOATS and SMALL_FLOATS[dtype].nbits == 8:
        return int(np.isnan(np.array(SMALL_FLOATS[dtype].value_by_bits)[values]).sum())
    return 0


def nan_warnings(number: int) -> tuple[str, ...]:
    """Return a warning if the delta contains NaN."""
    return (f"{count(number, 'new value', 'is')} NaN: vLLM refuses such a patch",) if number else ()
