"""Collect numbers by step, thinned as they come: of millions a few hundred stretches, as many as a picture can show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_MOST = 500  # stretches, each drawn with its lowest, its highest and its mean
_GAP = 8  # times the distance of the two steps before, and the line is broken
_MOST_BAD = 100
_MOST_BREAKS = 100  # then the line goes on over them, or there would be nothing but breaks


@dataclass(slots=True)
class Stretch:
    """Numbers of consecutive steps. `is_apart` if the line is broken before them."""

    first: float
    last: float
    low: float
    high: float
    total: float
    count: int
    is_apart: bool

    @property
    def mean(self) -> float:
        return self.total / self.count

    def join(self, later: Stretch) -> None:
        """Add all of a later stretch."""
        self.last = later.last
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.count += later.count


@dataclass(slots=True)
class Series:
    """A metric. `bad` are the first steps at which it was no finite number, and `bad_count` counts all of them."""

    name: str
    stretches: list[Stretch] = field(default_factory=list)
    bad: list[float] = field(default_factory=list)
    bad_count: int = 0
    latest: float | None = None
    _width: int = 1  # how many numbers a stretch is to have
    _stride: float = 0.0  # from one step to the next
    _is_broken: bool = False
    _breaks: int = 0

    def add(self, step: float, value: float) -> None:
        """Add the number at a step. A step not after the last one was taken again: all from there on is forgotten."""
        if not self.stretches or step <= self.stretches[-1].last:
            self._go_back(step)
        if not math.isfinite(value):
            self.bad_count += 1
            self._is_broken = True
            if len(self.bad) < _MOST_BAD:
                self.bad.append(step)
            return
        self.latest = value
        found = Stretch(step, step, value, value, value, 1, self._breaks_before(step))
        if not found.is_apart and self.stretches[-1].count < self._width:
            self.stretches[-1].join(found)
            return
        self.stretches.append(found)
        if len(self.stretches) > 2 * _MOST:
            self._halve()

    def _go_back(self, step: float) -> None:
        while self.stretches and self.stretches[-1].first >= step:
            self.stretches.pop()
        while self.bad and self.bad[-1] >= step:
            self.bad.pop()
            self.bad_count -= 1

    def _breaks_before(self, step: float) -> bool:
        if not self.stretches:
            return True
        distance = step - self.stretches[-1].last
        is_gap = 0 < self._stride * _GAP < distance
        self._stride = distance
        is_broken, self._is_broken = self._is_broken or is_gap, False
        self._breaks += is_broken
        return is_broken and self._breaks <= _MOST_BREAKS

    def _halve(self) -> None:
        for one, other in zip(self.stretches[::2], self.stretches[1::2], strict=False):
            one.join(other)
        self.stretches = self.stretches[::2]
        self._width *= 2

    @property
    def low(self) -> float:
        """Return the lowest number."""
        return min(stretch.low for stretch in self.stretches)

    @property
    def high(self) -> float:
        """Return the highest number."""
        return max(stretch.high for stretch in self.stretches)

    def at(self, step: float) -> float | None:
        """Return the mean of the stretch that a step lies in, None if it lies in none."""
        return next((one.mean for one in self.stretches if one.first <= step <= one.last), None)
