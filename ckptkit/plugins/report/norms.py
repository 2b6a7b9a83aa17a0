"""Measure the norm of every tensor of a model, and sort them by layer. Reads every number of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.cli.pictures.shards import is_number
from ckptkit.engine.survey import survey
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import locate
from ckptkit.io.progress import Told
from ckptkit.layout import Layout
from ckptkit.layout.counting import Count
from ckptkit.models.names.weights import find_weights
from ckptkit.plugins.report.layers import LayerKind


@dataclass(frozen=True, slots=True)
class Norms:
    """The counts of each tensor's numbers, and the norms of tensors in numbered layers."""

    counts: Mapping[str, Count]
    kinds: tuple[LayerKind, ...]

    @property
    def unsound(self) -> list[str]:
        """Return the names of tensors that hold NaN or an infinity."""
        return [name for name, found in self.counts.items() if found.nan or found.inf]


def weights_of(layout: Layout) -> Layout:
    """Return the model in a checkpoint; all of it where that does not show."""
    try:
        return find_weights(layout).layout
    except (Mismatch, Unsupported):
        return layout


def measure_norms(weights: Layout, *, jobs: int | None = None, progress: Told | None = None) -> Norms:
    """Read every tensor, with `jobs` threads. Raises `Corrupt` where bytes are missing."""
    located = locate(weights)
    counts = survey(located, jobs=jobs, progress=progress)
    return Norms(counts, by_layer({name: found.moments.norm for name, found in counts.items()}))


def by_layer(norms: Mapping[str, float]) -> tuple[LayerKind, ...]:
    """Return the norms of tensors in numbered layers, by their name without the number; experts of a layer are one."""
    found: dict[str, dict[int, float]] = {}
    for name, norm in norms.items():
        steps = name.split(".")
        numbers = [int(step) for step in steps[:-1] if is_number(step)]
        if numbers and math.isfinite(norm):
            layers = found.setdefault(".".join("*" if is_number(step) else step for step in steps), {})
            layers[numbers[0]] = math.hypot(layers.get(numbers[0], 0.0), norm)
    return tuple(LayerKind(name, layers) for name, layers in found.items())
