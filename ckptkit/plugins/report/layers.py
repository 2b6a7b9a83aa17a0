"""Measure the norm of every tensor, and draw the norms by layer as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.cli.pictures.shard_svg import OWNERS
from ckptkit.cli.pictures.shards import is_numeric_component
from ckptkit.engine.survey import count_values_by_tensor
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.io.progress import Told
from ckptkit.layout import Layout
from ckptkit.layout.counting import Count
from ckptkit.markup import Markup, element, svg_image
from ckptkit.models.names.weights import find_weights
from ckptkit.plugins.report.curves import Axis, draw_grid, draw_step_axis, path_through, value_axis
from ckptkit.words import format_brief


@dataclass(frozen=True, slots=True)
class Norms:
    """The statistics of each tensor's values, and the norms of tensors by layer."""

    counts: Mapping[str, Count]
    kinds: tuple[LayerKind, ...]

    @property
    def non_finite_tensors(self) -> list[str]:
        """Return the names of tensors with NaN or infinity."""
        return [name for name, counted in self.counts.items() if counted.nan or counted.inf]


def model_or_full_layout(layout: Layout) -> Layout:
    """Return the model in a checkpoint; the full layout if the model cannot be identified."""
    try:
        return find_weights(layout).layout
    except (Mismatch, Unsupported):
        return layout


def measure_norms(weights: Layout, *, jobs: int | None = None, progress: Told | None = None) -> Norms:
    """Read every tensor, with `jobs` threads. Raises `Corrupt` if bytes are missing."""
    located = locate_all_chunks(weights)
    counts = count_values_by_tensor(located, jobs=jobs, progress=progress)
    return Norms(counts, norms_by_layer({name: counted.moments.norm for name, counted in counts.items()}))


def norms_by_layer(norms: Mapping[str, float]) -> tuple[LayerKind, ...]:
    """Return the norms by layer for each tensor name without layer index; the experts of a layer are combined."""
    by_kind: dict[str, dict[int, float]] = {}
    for name, norm in norms.items():
        steps = name.split(".")
        numbers = [int(step) for step in steps[:-1] if is_numeric_component(step)]
        if numbers and math.isfinite(norm):
            layers = by_kind.setdefault(".".join("*" if is_numeric_component(step) else step for step in steps), {})
            layers[numbers[0]] = math.hypot(layers.get(numbers[0], 0.0), norm)
    return tuple(LayerKind(name, layers) for name, layers in by_kind.items())


_WIDTH, _HEIGHT = 960, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 640, 20, 300
_NARROW = 360  # width of a picture with its line labels below
_APART = 15  # distance between two line labels
_LETTERS = 42


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A tensor name without layer index, and a value per layer."""

    name: str
    by_layer: dict[int, float]


def draw_layers(title: str, kinds: Sequence[LayerKind], *, is_narrow: bool = False) -> Markup:
    """Draw one or more kinds, each with at least one layer; all values must be finite."""
    width, right = (_NARROW, _NARROW - 12) if is_narrow else (_WIDTH, _RIGHT)
    height = _HEIGHT + _APART * len(kinds) if is_narrow else _HEIGHT
    numbers = [value for kind in kinds for value in kind.by_layer.values()]
    layers = [layer for kind in kinds for layer in kind.by_layer]
    x = Axis(min(layers), max(layers), _LEFT, right)
    y = value_axis(min(numbers), max(numbers), _BOTTOM, _TOP, may_be_log=True)
    return svg_image(
        title,
        f"0 0 {width} {height}",
        draw_grid(y, _LEFT, right),
        draw_step_axis(x, _BOTTOM),
        element("text", "layer", x=_LEFT - 6, y=_BOTTOM + 15, text_anchor="end"),
        (draw_kind_line(kind, x, y, OWNERS[i % len(OWNERS)]) for i, kind in enumerate(kinds)),
        draw_names_below(kinds) if is_narrow else draw_names_beside(kinds, y),
    )


def draw_kind_line(kind: LayerKind, x: Axis, y: Axis, fill: str) -> Markup:
    """Draw the line of a kind, with a dot and a tooltip per layer."""
    points = [
        (layer, value, x.coordinate_of(layer), y.coordinate_of(value)) for layer, value in sorted(kind.by_layer.items())
    ]
    dots = [
        element(
            "circle", element("title", f"{kind.name}, layer {layer}: {format_brief(value)}"), cx=at, cy=height, r=2.6
        )
        for layer, value, at, height in points
    ]
    line = element("path", d=path_through([point[2:] for point in points]), class_="curve", stroke=fill)
    return element("g", line, dots, fill=fill, class_="kind")


def draw_names_beside(kinds: Sequence[LayerKind], y: Axis) -> Iterator[Markup]:
    """Draw the names next to the ends of the lines, moved apart if they would overlap."""
    ends = sorted((y.coordinate_of(kind.by_layer[max(kind.by_layer)]), i, kind.name) for i, kind in enumerate(kinds))
    wanted = [height for height, _, _ in ends]
    for (height, i, name), at in zip(ends, spread_apart(wanted, _TOP, _BOTTOM), strict=True):
        line = path_through([(_RIGHT + 5, height), (_RIGHT + 15, at), (_RIGHT + 22, at)])
        yield element("g", element("path", d=line, class_="curve", stroke=OWNERS[i % len(OWNERS)]), class_="kind")
        yield element("text", shorten_start(name), x=_RIGHT + 28, y=at + 3.5, class_="name")


def draw_names_below(kinds: Sequence[LayerKind]) -> Iterator[Markup]:
    """Draw the names below the picture, each after a sample of its line."""
    for i, kind in enumerate(kinds):
        at = _HEIGHT + _APART * i
        line = path_through([(4, at), (20, at)])
        yield element("g", element("path", d=line, class_="curve", stroke=OWNERS[i % len(OWNERS)]), class_="kind")
        yield element("text", shorten_start(kind.name), x=28, y=at + 3.5, class_="name")


def shorten_start(name: str) -> str:
    return name if len(name) <= _LETTERS else f"…{name[-_LETTERS + 1 :]}"


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
