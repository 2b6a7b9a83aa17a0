"""Count kinds of values (NaN, infinite, zero, denormal) among stored elements, and compute mean and deviation.

Floats are classified by their bits, which order like integers within a sign
(https://en.wikipedia.org/wiki/IEEE_754-1985#Comparing_floating-point_numbers). If the extremes of the bits, read as
signed and unsigned, are ordinary values, so is a whole part. Only other parts are checked element by element.

All sums are in float64. The sums of a part are over differences to its first value, so that a spread much smaller than
the mean is not lost. Parts are merged with the formula of Chan, Golub and LeVeque
(https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ckptkit.engine.casting import widener
from ckptkit.layout.dtypes import DTYPES, SMALL_FLOATS, DType, SmallFloat

Array = NDArray[Any]

_PART = 1 << 18  # values at a time, as in `casting`
_ROW = 1 << 13  # values in a dot product: with more, BLAS starts its own threads
Number = int | float

_PART_BYTES = 1 << 20  # bytes at a time, as in `casting`


@dataclass(frozen=True, slots=True)
class Moments:
    """The mean of `finite` values, and the sum of their squared distances from it, `spread`."""

    finite: int = 0
    mean: float = 0.0
    spread: float = 0.0

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the values themselves (divided by n, not n - 1)."""
        return sqrt(self.spread / self.finite) if self.finite else 0.0

    @property
    def norm(self) -> float:
        """Return the square root of the sum of squares."""
        return sqrt(self.spread + self.finite * self.mean * self.mean)

    def merge(self, other: Moments) -> Moments:
        if not self.finite or not other.finite:
            return self if self.finite else other
        finite = self.finite + other.finite
        share = other.finite / finite
        apart = other.mean - self.mean
        spread = self.spread + other.spread + apart * apart * (self.finite * share)
        if isfinite(spread):
            return Moments(finite, self.mean + apart * share, spread)
        return Moments(finite, self.mean * (1 - share) + other.mean * share, inf)  # the squares overflow float64


def measure_moments(stored: Array, widen: Callable[[Array], Array]) -> Moments:
    """Return the moments of the finite values in a 1-D array. `widen` converts stored elements to values."""
    moments = Moments()
    scratch = np.empty(min(_PART, len(stored)))
    for start in range(0, len(stored), _PART):
        moments = moments.merge(_moments_of_part(widen(stored[start : start + _PART]), scratch))
    return moments


def moments_of_repeated_values(numbers: Array, repeats: Array) -> Moments:
    """Return the moments of finite values. Each value occurs `repeats` times."""
    is_counted = np.isfinite(numbers) & (repeats > 0)
    values, times = numbers[is_counted], repeats[is_counted]
    finite = int(times.sum())
    if not finite:
        return Moments()
    mean = float(values @ times) / finite
    return Moments(finite, mean, float(np.square(values - mean) @ times))


def _moments_of_part(numbers: Array, scratch: Array) -> Moments:
    count = len(numbers)
    apart = scratch[:count]
    with np.errstate(invalid="ignore", over="ignore"):
        np.copyto(apart, numbers)  # in two steps: subtraction with a cast to float64 has half this speed
        apart -= apart[0]
        total, squares = float(apart.sum()), sum_of_squares(apart)
    if isfinite(squares):
        return Moments(count, float(numbers[0]) + total / count, max(0.0, squares - total * total / count))
    finite = numbers[np.isfinite(numbers)]
    if len(finite) == count:  # the squares overflow float64, and the sum may too
        with np.errstate(over="ignore"):
            mean = (numbers / count).sum()
        return Moments(count, float(np.clip(mean, numbers.min(), numbers.max())), inf)
    return _moments_of_part(finite, scratch) if len(finite) else Moments()


def sum_of_squares(values: Array) -> float:
    """Return the sum of squares of 1-D float64 `values`, in rows so short that BLAS starts no threads."""
    rows = len(values) // _ROW * _ROW
    table, rest = values[:rows].reshape(-1, _ROW), values[rows:]
    return float(np.vecdot(table, table).sum() + np.dot(rest, rest))


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
            count = _count_small_floats(np.frombuffer(part, np.uint8), SMALL_FLOATS[dtype.name])
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


def _count_small_floats(codes: Array, kind: SmallFloat) -> Count:
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
        moments=moments_of_repeated_values(values, occurrences),
    )
