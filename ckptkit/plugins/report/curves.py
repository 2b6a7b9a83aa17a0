"""Draw metrics by step as SVG with axes: the mean as a line, with a band from the minimum to the maximum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptkit.markup import Markup, element, svg_image
from ckptkit.plugins.report.history import Segment, Series
from ckptkit.words import count, format_brief

_MANY_TIMES = 50  # a logarithmic axis is used if the maximum is more than this many times the minimum


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from value `low` at coordinate `start` to value `high` at coordinate `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def coordinate_of(self, number: float) -> float:
        low, high, at = self.low, self.high, number
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(number, low))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    @property
    def label_values(self) -> list[float]:
        return log_scale_ticks(self.low, self.high) if self.is_log else round_ticks(self.low, self.high)


def value_axis(low: float, high: float, start: float, end: float, *, may_be_log: bool = False) -> Axis:
    """Return an axis that covers `low` to `high`.

    It starts at zero if `low` is close to zero. With `may_be_log` it is logarithmic if the values span more than a
    factor of 50.
    """
    if may_be_log and low > 0 and high / low > _MANY_TIMES:
        return Axis(low, high, start, end, is_log=True)
    if 0 <= low < 0.4 * high or low == high > 0:
        low = 0.0
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(low if low == 0 else low - room, high + room, start, end)


def draw_step_axis(axis: Axis, y: float) -> Iterator[Markup]:
    """Draw the horizontal axis at `y` with its step labels."""
    yield element("line", x1=axis.start, x2=axis.end, y1=y, y2=y, class_="axis")
    for number in axis.label_values:
        x = axis.coordinate_of(number)
        anchor = "end" if x > axis.end - 14 else "start" if x < axis.start + 8 else "middle"
        if number == int(number):
            yield element("text", format_brief(number), x=x, y=y + 15, text_anchor=anchor)


def draw_grid(axis: Axis, left: float, right: float) -> Iterator[Markup]:
    """Draw a labeled grid line at each round value."""
    for number in axis.label_values:
        y = axis.coordinate_of(number)
        yield element("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", format_brief(number), x=left - 6, y=y + 3.5, text_anchor="end")


_WIDTH, _HEIGHT = 480, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 468, 40, 208
_MOST_SPOTS = 80  # hover columns per picture
_FEW = 40  # with so few segments, each is also drawn as a dot
_CLASSES = "ab"


def draw_curves(title: str, series: Sequence[Series], *, may_be_log: bool = False) -> Markup:
    """Draw one or two metrics by step, at least one with values; a logarithmic axis is used if `may_be_log`."""
    drawn = [metric for metric in series if metric.stretches]
    stretches = [stretch for metric in drawn for stretch in metric.stretches]
    x = Axis(min(s.first for s in stretches), max(s.last for s in stretches), _LEFT, _RIGHT)
    y = value_axis(
        min(metric.low for metric in drawn), max(metric.high for metric in drawn), _BOTTOM, _TOP, may_be_log=may_be_log
    )
    summary = "; ".join(summarize_series(metric) for metric in drawn)
    return svg_image(
        f"{title} by step: {summary}",
        f"0 0 {_WIDTH} {_HEIGHT}",
        element("text", title, x=2, y=14, class_="title"),
        draw_header(drawn),
        draw_grid(y, _LEFT, _RIGHT),
        draw_step_axis(x, _BOTTOM),
        element("text", "step", x=_LEFT - 6, y=_BOTTOM + 15, text_anchor="end"),
        (draw_curve(metric, x, y, _CLASSES[i]) for i, metric in enumerate(drawn)),
        (draw_not_finite(metric, x) for metric in drawn),
        draw_tooltips(drawn, x, y),
    )


def summarize_series(series: Series) -> str:
    bad = f", not finite at {count(series.bad_count, 'step')}" if series.bad_count else ""
    low, high, last = map(format_brief, (series.low, series.high, series.latest or 0.0))
    return f"{series.name} from {low} to {high}, last {last}{bad}"


def draw_header(drawn: Sequence[Series]) -> Iterator[Markup]:
    """Draw the last value of each metric, and a sample of its line."""
    right = float(_RIGHT)
    for i, metric in reversed(list(enumerate(drawn))):
        name = metric.name.replace("_", " ") if len(drawn) > 1 else "last"
        label = f"{name} {format_brief(metric.latest or 0.0)}"
        yield element("text", label, x=right, y=14, text_anchor="end", class_="strong")
        right -= 6.2 * len(label) + 10
        if len(drawn) > 1:
            yield element("line", x1=right - 8, x2=right + 4, y1=10, y2=10, class_=f"curve {_CLASSES[i]}")
            right -= 22


def draw_curve(series: Series, x: Axis, y: Axis, css_class: str) -> Iterator[Markup]:
    """Draw the line of a metric, broken where values are missing, and the band around it."""
    paths, bands = [], []
    for piece in unbroken_groups(series.stretches):
        centers = [x.coordinate_of((s.first + s.last) / 2) for s in piece]
        middle, upper, lower = (
            list(zip(centers, map(y.coordinate_of, values), strict=True))
            for values in ([s.mean for s in piece], [s.high for s in piece], [s.low for s in piece])
        )
        paths.append(path_through(middle))
        if any(s.count > 1 for s in piece) and len(piece) > 1:
            bands.append(path_through([*upper, *reversed(lower)]) + "Z")
        if len(series.stretches) <= _FEW or len(piece) == 1:
            yield from (element("circle", cx=at, cy=height, r=1.8, class_=f"dot {css_class}") for at, height in middle)
    if bands:
        yield element("path", d="".join(bands), class_=f"band {css_class}")
    yield element("path", d="".join(paths), class_=f"curve {css_class}")


def unbroken_groups(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments in groups; the line is broken between two groups."""
    groups: list[list[Segment]] = []
    for stretch in segments:
        if stretch.starts_gap or not groups:
            groups.append([])
        groups[-1].append(stretch)
    return groups


def path_through(points: Sequence[tuple[float, float]]) -> str:
    """Return a polyline through points, as the attribute `d` of an SVG path."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def draw_not_finite(series: Series, x: Axis) -> Iterator[Markup]:
    """Draw a short line at each step where a metric was NaN or infinite."""
    for step in series.bad:
        at = min(max(x.coordinate_of(step), _LEFT), _RIGHT)
        tip = element("title", f"{series.name} is not finite at {step:,.0f}")
        yield element("line", tip, x1=at, x2=at, y1=_BOTTOM - 9, y2=_BOTTOM, class_="bad")
    if series.bad_count:
        label = f"not finite at {series.bad_count:,} step{'s' * (series.bad_count > 1)}"
        yield element("text", label, x=_RIGHT, y=_TOP - 8, text_anchor="end", class_="bad")


def draw_tooltips(drawn: Sequence[Series], x: Axis, y: Axis) -> Iterator[Markup]:
    """Draw invisible columns that show the values at their step on hover, without a script."""
    stretches = drawn[0].stretches
    every = -(-len(stretches) // _MOST_SPOTS)
    chosen = stretches[::every]
    x_positions = [x.coordinate_of((s.first + s.last) / 2) for s in chosen]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(x_positions)), _RIGHT]
    for stretch, at, (left, right) in zip(chosen, x_positions, pairwise(edges), strict=True):
        first, last, low, high = stretch.first, stretch.last, stretch.low, stretch.high
        where = f"{first:,.0f}" if first == last else f"{first:,.0f} to {last:,.0f}"
        spread = f" ({format_brief(low)} to {format_brief(high)})" if low != high else ""
        others = [(metric.name, metric.format_value_at(first)) for metric in drawn[1:]]
        more = "".join(f", {name} {value}" for name, value in others if value)
        label = f"step {where}: {format_brief(stretch.mean)}{spread}{more}"
        label_width = 5.9 * len(label) + 12
        start = min(max(at - label_width / 2, _LEFT), _RIGHT - label_width)
        yield element(
            "g",
            element("rect", x=left, y=_TOP, width=max(right - left, 0.5), height=_BOTTOM - _TOP, class_="reach"),
            element("line", x1=at, x2=at, y1=_TOP, y2=_BOTTOM, class_="axis"),
            element("circle", cx=at, cy=y.coordinate_of(stretch.mean), r=3.2, class_="dot a"),
            element("rect", x=start, y=_TOP - 20, width=label_width, height=17, rx=4, class_="plate"),
            element("text", label, x=start + 6, y=_TOP - 8, class_="strong"),
            class_="spot",
        )


def round_ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers between two others."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * max(factor for factor in (1, 2, 5, 10) if factor * power <= rough * 1.3)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_scale_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two positive numbers; for a large range, only powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, (last - first) // 4)
    numbers = (factor * 10.0**power for power in range(first, last + 1, every) for factor in factors)
    return [number for number in numbers if low * 0.999 <= number <= high * 1.001]
