"""Measure how far the values of two tensors differ."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Self

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The bound for close values: `|a - b| <= atol + rtol * |b|`, the same infinity, or both NaN."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of elements `b` from elements `a`: the number of `elements` measured, and of `different` ones.

    `strange` is the number of different elements that are NaN or infinite on either side. The other fields cover finite
    values: `max_abs` is the largest |a - b|, exact for integers; `gap`, `size_a` and `size_b` are sums of squares of a
    - b, a and b. `first` is the index of the first different element, in row-major order.
    """

    elements: int = 0
    different: int = 0
    strange: int = 0
    max_abs: int | float = 0
    gap: float = 0.0
    size_a: float = 0.0
    size_b: float = 0.0
    first: Index | None = None

    def merge(self, other: Self) -> Distance:
        """Return the distance of both parts together, in any order."""
        firsts = [first for first in (self.first, other.first) if first is not None]
        return Distance(
            self.elements + other.elements,
            self.different + other.different,
            self.strange + other.strange,
            max(self.max_abs, other.max_abs),
            self.gap + other.gap,
            self.size_a + other.size_a,
            self.size_b + other.size_b,
            min(firsts, default=None),
        )

    @property
    def equal_fraction(self) -> float:
        """Return the fraction of the elements that are not different; 1 if there are none."""
        return 1 - self.different / self.elements if self.elements else 1.0

    @property
    def rel_l2(self) -> float:
        """Return ||a - b|| / ||a||: 0 if a and b are equal, infinite if they differ and all of `a` is zero."""
        if not self.gap:
            return 0.0
        return sqrt(self.gap / self.size_a) if self.size_a and isfinite(self.gap) else inf

    @property
    def cosine(self) -> float | None:
        """Return the cosine of the angle between `a` and `b`; None if one is zero, or too large to be squared."""
        if not (self.size_a and self.size_b and isfinite(self.size_a + self.size_b + self.gap)):
            return None
        cosine = (self.size_a + self.size_b - self.gap) / (2 * sqrt(self.size_a) * sqrt(self.size_b))
        return max(-1.0, min(1.0, cosine))
