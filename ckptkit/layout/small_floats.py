"""List every value of the float dtypes of 8 bits or fewer.

Sources: the OCP specifications of 8-bit floats (E4M3, E5M2) and of microscaling formats (E8M0, E2M1), and
https://arxiv.org/abs/2206.02915 for the dtypes without a negative zero (fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, nan


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
        return 2.0 ** ((1 if self.mantissa else 0) - self.bias)

    @cached_property
    def value_by_bits(self) -> tuple[float, ...]:
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
