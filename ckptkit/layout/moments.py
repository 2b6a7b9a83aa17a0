"""Compute mean and spread of values, in parts that are merged without loss of accuracy.

All sums are in float64. The sums of a part are over differences to its first value, so that a spread much smaller than
the mean is not lost. Parts are merged with the formula of Chan, Golub and LeVeque
(https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_PART = 1 << 18  # values at a time, as in `casting`
_ROW = 1 << 13  # values in a dot product: with more, BLAS starts its own threads


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


def measure_repeated(numbers: Array, repeats: Array) -> Moments:
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
