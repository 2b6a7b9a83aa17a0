"""Sort the norms of tensors by layer, and draw them as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ckptkit.engine.counting import Count
from ckptkit.markup import Markup, element, svg_image
from ckptkit.plugins.report.curves import Axis, draw_grid, draw_step_axis, path_through, value_axis
from ckptkit.plugins.report.shard_svg import OWNERS
from ckptkit.plugins.report.shards import is_numeric_component
from ckptkit.words import format_brief


def norms_by_layer(counts: Mapping[str, Count]) -> dict[str, dict[int, float]]:
    """Return the norms by layer for each tensor name without layer index; the experts of a layer are combined."""
    by_kind: dict[str, dict[int, float]] = {}
    for name, counted in counts.items():
        steps, norm = name.split("."), counted.moments.norm
        numbers = [int(step) for step in steps[:-1] if is_numeric_component(step)]
        if numbers and math.isfinite(norm):
            layers = by_kind.setdefault(".".join("*" if is_numeric_component(step) else step for step in steps), {})
            layers[numbers[0]] = math.hypot(layers.get(numbers[0], 0.0), norm)
    return by_kind


_WIDTH, _HEIGHT = 960, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 640, 20, 300
_NARROW = 360  # width of a picture with its line labels below
_APART = 15  # distance between two line labels
_LETTERS = 42


def draw_layers(title: str, kinds: Mapping[str, Mapping[int, float]], *, is_narrow: bool = False) -> Markup:
    """Draw a value per layer for one or more kinds of tensors, each with at least one layer; all must be finite."""
    width, right = (_NARROW, _NARROW - 12) if is_narrow else (_WIDTH, _RIGHT)
    height = _HEIGHT + _APART * len(kinds) if is_narrow else _HEIGHT
    values = [value for by_layer in kinds.values() for value in by_layer.values()]
    layers = [layer for by_layer in kinds.values() for layer in by_layer]
    x = Axis(min(layers), max(layers), _LEFT, right)
    y = value_axis(min(values), max(values), _BOTTOM, _TOP, may_be_log=True)
    fills = {name: OWNERS[i % len(OWNERS)] for i, name in enumerate(kinds)}
    return svg_image(
        title,
        f"0 0 {width} {height}",
        draw_grid(y, _LEFT, right),
        draw_step_axis(x, _BOTTOM),
        element("text", "layer", x=_LEFT - 6, y=_BOTTOM + 15, text_anchor="end"),
        (draw_kind_line(name, by_layer, x, y, fills[name]) for name, by_layer in kinds.items()),
        draw_names_below(fills) if is_narrow else draw_names_beside(kinds, y, fills),
    )


def draw_kind_line(name: str, by_layer: Mapping[int, float], x: Axis, y: Axis, fill: str) -> Markup:
    """Draw the line of a kind, with a dot and a tooltip per layer."""
    layers = sorted(by_layer)
    points = [(x.coordinate_of(layer), y.coordinate_of(by_layer[layer])) for layer in layers]
    tips = [element("title", f"{name}, layer {layer}: {format_brief(by_layer[layer])}") for layer in layers]
    dots = [element("circle", tip, cx=at, cy=height, r=2.6) for tip, (at, height) in zip(tips, points, strict=True)]
    line = element("path", d=path_through(points), class_="curve", stroke=fill)
    return element("g", line, dots, fill=fill, class_="kind")


def draw_names_beside(kinds: Mapping[str, Mapping[int, float]], y: Axis, fills: Mapping[str, str]) -> Iterator[Markup]:
    """Draw the names next to the ends of the lines, moved apart if they would overlap."""
    ends = sorted((y.coordinate_of(by_layer[max(by_layer)]), name) for name, by_layer in kinds.items())
    wanted = [height for height, _ in ends]
    for (height, name), at in zip(ends, spread_apart(wanted, _TOP, _BOTTOM), strict=True):
        line = [(_RIGHT + 5, height), (_RIGHT + 15, at), (_RIGHT + 22, at)]
        yield from draw_name(name, line, fills[name], _RIGHT + 28)


def draw_names_below(fills: Mapping[str, str]) -> Iterator[Markup]:
    """Draw the names below the picture, each after a sample of its line."""
    for i, (name, fill) in enumerate(fills.items()):
        at = _HEIGHT + _APART * i
        yield from draw_name(name, [(4, at), (20, at)], fill, 28)


def draw_name(name: str, line: Sequence[tuple[float, float]], fill: str, x: float) -> Iterator[Markup]:
    """Draw a line in the color of a kind, and the end of its name beside the end of the line."""
    yield element("g", element("path", d=path_through(line), class_="curve", stroke=fill), class_="kind")
    shown = name if len(name) <= _LETTERS else f"…{name[-_LETTERS + 1 :]}"
    yield element("text", shown, x=x, y=line[-1][1] + 3.5, class_="name")


def spread_apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Return coordinates close to the `wanted` ones, in order and `_APART` from each other.

    They stay between `low` and `high` if there is enough space.
    """
    spaced: list[float] = []
    for position in wanted:
        spaced.append(max(position, spaced[-1] + _APART if spaced else low))
    limit = max(high, low + _APART * (len(spaced) - 1))
    for i in reversed(range(len(spaced))):
        spaced[i] = min(spaced[i], limit)
        limit = spaced[i] - _APART
    return spaced
