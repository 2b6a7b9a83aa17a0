"""Count kinds of values (NaN, infinite, zero, denormal) among stored elements, and compute mean and deviation.

Floats are classified by their bits, which order like integers within a sign
(https://en.wikipedia.org/wiki/IEEE_754-1985#Comparing_floating-point_numbers). If the extremes of the bits, read as
signed and unsigned, are ordinary values, so is a whole part. Only other parts are checked element by element.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ckptkit.layout.casting import widener
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.moments import Moments, measure_moments, measure_repeated
from ckptkit.layout.small_floats import SMALL_FLOATS, SmallFloat

Array = NDArray[Any]
Number = int | float

_PART_BYTES = 1 << 20  # bytes at a time, as in `casting`


@dataclass(frozen=True, slots=True)
class Count:
    """Counts of some values: NaN, infinite, zero, denormal; the lowest and highest value that is not NaN.

    A complex element counts as two values, and so does a byte with two 4-bit values. `low` and `high` are None if all
    are NaN. `moments` covers the finite values.
    """

    numbers: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    denormal: int = 0
    low: Number | None = None
    high: Number | None = None
    moments: Moments = field(default_factory=Moments)

    @property
    def is_all_zero(self) -> bool:
        """Return True if there are values, and all are zero."""
        return 0 < self.zero == self.numbers

    @property
    def is_constant(self) -> bool:
        """Return True if there are several values, and all are equal."""
        return self.numbers > 1 and not self.nan and self.low == self.high

    @property
    def sparsity(self) -> float:
        return self.zero / self.numbers if self.numbers else 0.0

    def merge(self, other: Count) -> Count:
        return Count(
            self.numbers + other.numbers,
            self.nan + other.nan,
            self.inf + other.inf,
            self.zero + other.zero,
            self.denormal + other.denormal,
            min((low for low in (self.low, other.low) if low is not None), default=None),
            max((high for high in (self.high, other.high) if high is not None), default=None),
            self.moments.merge(other.moments),
        )


def count_values(data: memoryview, dtype: DType) -> Count:
    """Return the counts of stored elements of a dtype. Integers and booleans are never NaN, infinite or denormal."""
    total = Count()
    for start in range(0, len(data), _PART_BYTES):
        part = data[start : start + _PART_BYTES]
        if dtype.kind == "small_float":
            count = _count_small(np.frombuffer(part, np.uint8), SMALL_FLOATS[dtype.name])
        elif dtype.kind in ("float", "complex"):
            name = _COMPONENTS.get(dtype.name, dtype.name)
            kind = _FLOATS[name]
            bits = np.frombuffer(part, f"u{kind.nbytes}")
            count = replace(_count_floats(bits, kind), moments=measure_moments(bits, widener(DTYPES[name])))
        else:
            values = np.frombuffer(part, _INTEGERS.get(dtype.name, dtype.name))
            zero, low, high = len(values) - int(np.count_nonzero(values)), values.min().item(), values.max().item()
            moments = measure_moments(values, lambda stored: stored)
            count = Count(len(values), zero=zero, low=low, high=high, moments=moments)
        total = total.merge(count)
    return total


# other integers have the same name in numpy
_INTEGERS = {"bool": "uint8", "quint8": "uint8", "qint8": "int8", "qint32": "int32"}


# Floats of 16 bits and more, by their bits


@dataclass(frozen=True, slots=True)
class _Float:
    """A float dtype: its size in bytes, and the size of the numpy float whose upper part it is.

    `normal` and `infinity` are magnitudes as bits: the smallest normal number, and infinity. Larger magnitudes are NaN.
    """

    nbytes: int
    numpy_nbytes: int
    normal: int
    infinity: int

    @property
    def sign_bit(self) -> int:
        return 1 << (8 * self.nbytes - 1)

    def decode(self, bits: int) -> float:
        raw = bits.to_bytes(self.nbytes, "little").rjust(self.numpy_nbytes, b"\0")
        return float(np.frombuffer(raw, f"<f{self.numpy_nbytes}")[0])


_FLOATS = {
    "float64": _Float(8, 8, 1 << 52, 0x7FF << 52),
    "float32": _Float(4, 4, 1 << 23, 0xFF << 23),
    "float16": _Float(2, 2, 1 << 10, 0x1F << 10),
    "bfloat16": _Float(2, 4, 1 << 7, 0xFF << 7),
}
_COMPONENTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def _count_floats(bits: Array, kind: _Float) -> Count:
    """Return the counts of floats, given as unsigned integers."""
    extremes = _Extremes.of(bits, kind)
    if kind.normal <= extremes.least and extremes.most < kind.infinity:
        return Count(len(bits), low=kind.decode(extremes.low), high=kind.decode(extremes.high))
    magnitudes = bits & bits.dtype.type(kind.sign_bit - 1)
    counts = Count(
        len(bits),
        nan=int(np.count_nonzero(magnitudes > kind.infinity)),
        inf=int(np.count_nonzero(magnitudes == kind.infinity)),
        zero=int(np.count_nonzero(magnitudes == 0)),
        denormal=int(np.count_nonzero((magnitudes > 0) & (magnitudes < kind.normal))),
    )
    if counts.nan == counts.numbers:
        return counts
    if counts.nan:
        extremes = _Extremes.of(bits[magnitudes <= kind.infinity], kind)
    return replace(counts, low=kind.decode(extremes.low), high=kind.decode(extremes.high))


@dataclass(frozen=True, slots=True)
class _Extremes:
    """The smallest and largest magnitude, and the lowest and highest value, all as bits."""

    least: int
    most: int
    low: int
    high: int

    @classmethod
    def of(cls, bits: Array, kind: _Float) -> Self:
        """Return the extremes. Unsigned, negative floats come last; signed, first. Bits grow with the magnitude."""
        signed = bits.view(f"i{kind.nbytes}")
        first, last = int(bits.min()), int(bits.max())
        first_signed, last_signed = (int(at) % (2 * kind.sign_bit) for at in (signed.min(), signed.max()))
        return cls(
            least=min(first % kind.sign_bit, first_signed % kind.sign_bit),
            most=max(last % kind.sign_bit, last_signed % kind.sign_bit),
            low=last if last >= kind.sign_bit else first,
            high=last_signed if last_signed < kind.sign_bit else first,
        )


# Floats of 8 bits and fewer, by how often each byte occurs


def _count_small(codes: Array, kind: SmallFloat) -> Count:
    """Return the counts of floats of 8 bits or fewer, given as bytes."""
    occurrences = np.bincount(codes, minlength=256)
    if kind.nbits == 4:
        pairs = occurrences.reshape(16, 16)
        occurrences = pairs.sum(axis=0) + pairs.sum(axis=1)
    values = np.array(kind.value_by_bits)
    numbers = values[(occurrences > 0) & ~np.isnan(values)]
    return Count(
        int(occurrences.sum()),
        nan=int(occurrences[np.isnan(values)].sum()),
        inf=int(occurrences[np.isinf(values)].sum()),
        zero=int(occurrences[values == 0].sum()),
        denormal=int(occurrences[(values != 0) & (np.abs(values) < kind.smallest_normal)].sum()),
        low=numbers.min().item() if len(numbers) else None,
        high=numbers.max().item() if len(numbers) else None,
        moments=measure_repeated(values, occurrences),
    )
