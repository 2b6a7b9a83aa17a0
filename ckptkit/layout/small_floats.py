"""List every value of the float dtypes of 8 bits or fewer, and round to float8_e4m3fn.

Sources: the OCP specifications of 8-bit floats (E4M3, E5M2) and of microscaling formats (E8M0, E2M1), and
https://arxiv.org/abs/2206.02915 for the dtypes without a negative zero (fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Rounding to float8_e4m3fn is to nearest, ties to even, as in torch.
#
# The upper 16 bits of a float32 determine the result, if their last bit is set wherever the lower half is not zero.
# This neither creates nor removes ties, since these bits have four more mantissa bits than the result. There are
# 65,536 upper halves, so a table has all results.
Array = NDArray[Any]

LARGEST = 448.0
_SIGN, _NAN = 0x80, 0x7F
_ABOVE = 0x7F81  # upper halves from here on are NaN


def round_to_e4m3(values: Array) -> Array:
    """Return float32 values as bytes of float8_e4m3fn. Magnitudes above 448 become 448; NaN stays NaN."""
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    halves = bits & 0xFFFF
    halves += 0xFFFF  # carries into bit 16 unless the lower half is zero
    halves |= bits
    halves >>= 16
    codes: Array = rounding_table().take(halves.astype(np.intp), mode="clip")
    return codes


@cache
def rounding_table() -> Array:
    """Return the result byte for each upper half of a float32."""
    halves = np.arange(_ABOVE, dtype=np.uint32)
    values = np.left_shift(halves, 16).view(np.float32).astype(np.float64)
    numbers = np.array(SMALL_FLOATS["float8_e4m3fn"].value_by_bits[:_NAN])
    between = (numbers[:-1] + numbers[1:]) / 2
    below = np.searchsorted(between, values)  # for a tie, the lower neighbor
    is_tie = between[np.minimum(below, len(between) - 1)] == values
    codes = np.full(1 << 15, _NAN, np.uint8)
    codes[:_ABOVE] = below + (is_tie & (below % 2 == 1))
    return np.concatenate([codes, codes | np.uint8(_SIGN)])


@dataclass(frozen=True)
class SmallFloat:
    """A dtype: its number of bits, of mantissa bits, and the bias of the exponent.

    `infinity` is a magnitude, as bits; larger ones are NaN. Without infinity, the bits in `nans` are NaN.
    """

    nbits: int
    mantissa: int
    bias: int
    infinity: int | None = None
    nans: tuple[int, ...] = ()
    is_signed: bool = True

    @property
    def smallest_normal(self) -> float:
        """Return the smallest normal magnitude."""
        return 2.0 ** ((1 if self.mantissa else 0) - self.bias)

    @cached_property
    def value_by_bits(self) -> tuple[float, ...]:
        """Return the value of each bit pattern."""
        return tuple(map(self._decode, range(1 << self.nbits)))

    def _decode(self, bits: int) -> float:
        sign, magnitude = divmod(bits, 1 << (self.nbits - 1)) if self.is_signed else (0, bits)
        if bits in self.nans or (self.infinity is not None and magnitude > self.infinity):
            return nan
        exponent, fraction = divmod(magnitude, 1 << self.mantissa)
        if magnitude == self.infinity:
            number = inf
        elif exponent or not self.mantissa:
            number = (1 + fraction / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias)
        else:
            number = fraction / (1 << self.mantissa) * self.smallest_normal
        return -number if sign else number


SMALL_FLOATS = {
    "float8_e5m2": SmallFloat(8, 2, 15, infinity=0x7C),
    "float8_e4m3fn": SmallFloat(8, 3, 7, nans=(0x7F, 0xFF)),
    "float8_e5m2fnuz": SmallFloat(8, 2, 16, nans=(0x80,)),
    "float8_e4m3fnuz": SmallFloat(8, 3, 8, nans=(0x80,)),
    "float8_e8m0fnu": SmallFloat(8, 0, 127, nans=(0xFF,), is_signed=False),
    "float4_e2m1fn_x2": SmallFloat(4, 1, 1),
}
