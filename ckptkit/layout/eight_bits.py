"""Round numbers to 8 bits, to float8_e4m3fn: to nearest, ties to even, as torch does.

The upper half of a float32 is enough to tell, if its last bit is set wherever the lower half has one: no tie is made or
lost by that, since four of its bits are more than the result has. There are 65,536 of them, so a table has the answers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.layout.small_floats import SMALL_FLOATS

Array = NDArray[Any]

LARGEST = 448.0
_SIGN, _NAN = 0x80, 0x7F
_ABOVE = 0x7F81  # halves from here on are NaN


def to_e4m3(values: Array) -> Array:
    """Return float32 as the bytes of float8_e4m3fn. What is larger than 448 becomes that; NaN stays NaN."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    halves = bits & 0xFFFF
    halves += 0xFFFF  # has the bit above it where there was one
    halves |= bits
    halves >>= 16
    found: Array = rounded().take(halves.astype(np.intp), mode="clip")
    return found


@cache
def rounded() -> Array:
    """Return the byte for each upper half of a float32."""
    halves = np.arange(_ABOVE, dtype=np.uint32)
    values = np.left_shift(halves, 16).view(np.float32).astype(np.float64)
    numbers = np.array(SMALL_FLOATS["float8_e4m3fn"].numbers[:_NAN])
    between = (numbers[:-1] + numbers[1:]) / 2
    below = np.searchsorted(between, values)  # of a tie the lower one
    is_tie = between[np.minimum(below, len(between) - 1)] == values
    codes = np.full(1 << 15, _NAN, np.uint8)
    codes[:_ABOVE] = below + (is_tie & (below % 2 == 1))
    return np.concatenate([codes, codes | np.uint8(_SIGN)])
