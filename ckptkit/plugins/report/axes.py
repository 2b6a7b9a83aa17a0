"""Place numbers in a picture, linearly or by powers of ten, and draw the lines and labels of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit.markup import Markup, element
from ckptkit.words import brief, powers, ticks

_MANY_TIMES = 50  # the highest of numbers is that many times the lowest: then powers of ten


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` at place `start` to `high` at place `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, number: float) -> float:
        """Return the place of a number."""
        low, high, at = self.low, self.high, number
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(number, low))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    @property
    def labels(self) -> list[float]:
        """Return the numbers to write along it."""
        return powers(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def value_axis(low: float, high: float, start: float, end: float, *, may_be_log: bool = False) -> Axis:
    """Return the axis for values between two: from zero if that is near, or by powers of ten if they differ much."""
    if may_be_log and low > 0 and high / low > _MANY_TIMES:
        return Axis(low, high, start, end, is_log=True)
    if 0 <= low < 0.4 * high or low == high > 0:
        low = 0.0
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(low if low == 0 else low - room, high + room, start, end)


def draw_labels(axis: Axis, y: float) -> Iterator[Markup]:
    """Draw the labels of steps, below a picture whose lower edge is at `y`."""
    yield element("line", x1=axis.start, x2=axis.end, y1=y, y2=y, class_="axis")
    for number in axis.labels:
        x = axis.place(number)
        anchor = "end" if x > axis.end - 14 else "start" if x < axis.start + 8 else "middle"
        if number == int(number):
            yield element("text", brief(number), x=x, y=y + 15, text_anchor=anchor)


def draw_grid(axis: Axis, left: float, right: float) -> Iterator[Markup]:
    """Draw a line with a label at each round value."""
    for number in axis.labels:
        y = axis.place(number)
        yield element("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", brief(number), x=left - 6, y=y + 3.5, text_anchor="end")
