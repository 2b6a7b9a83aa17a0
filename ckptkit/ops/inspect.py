"""Inspects: what a checkpoint is, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.companions import CONFIG, places_of
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.parts import open_parts
from ckptkit.checkpoints.producer import find_producer
from ckptkit.checkpoints.runs import TRAINING, step_of
from ckptkit.checkpoints.weights import find_weights, has_weights
from ckptkit.errors import Corrupt, IOFailure, Mismatch, Unsafe, Unsupported, translate_os_errors
from ckptkit.files.file import read_small
from ckptkit.files.path import to_path
from ckptkit.formats import locate
from ckptkit.formats.json_text import parse_json
from ckptkit.layout import Layout
from ckptkit.ops.inspection.groups import Group, bytes_by_dtype, group
from ckptkit.ops.inspection.ties import Tie, find_ties

_LIMIT = 1 << 24  # bytes of a config.json


@dataclass(frozen=True, slots=True)
class Inspected:
    """A checkpoint at a glance: `layout` is that of all its parts that can be read, `unread` says which cannot be.

    `model` is the part with the model, or the only one. `step`, `producer` and `parameters`, the model's elements with
    tied ones counted once, are None where nothing tells them. `groups` are "model", "optimizer" and "rest".
    """

    layout: Layout
    model: Layout
    step: int | None
    whole: Path
    producer: str | None
    world_size: int | None
    parameters: int | None
    groups: Mapping[str, Group]
    ties: tuple[Tie, ...]
    has_manifest: bool
    unread: tuple[str, ...]

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors of each dtype, most first."""
        return bytes_by_dtype(self.layout, self.layout.tensors)


def inspect(path: str | Path, *, with_places: bool = False) -> Inspected:
    """Look at the checkpoint at `path`, or the latest of the run at `path`. Reads no tensor data.

    With `with_places` each chunk's bytes are found inside its envelope, which costs two small reads a chunk.
    """
    unread: list[str] = []
    parts = open_parts(to_path(path), unread=unread)
    source, model = parts.path, parts.model
    weights = find_names(model)
    ties = find_ties(model, find_config(source), weights)
    layout = (parts.change(locate) if with_places else parts).join()
    return Inspected(
        layout,
        model,
        find_step(source),
        parts.whole,
        find_producer(source, *parts.layouts.values()),
        layout.world_size,
        count_parameters(model, weights, ties),
        group(parts.layouts.values(), weights),
        tuple(ties),
        (model.root / MANIFEST).exists() if source.is_dir() else False,
        tuple(unread),
    )


def find_step(source: Path) -> int | None:
    """The step in the name of a checkpoint, or of the one that it is a part of."""
    steps = (step_of(place) for place in (source.absolute(), source.absolute().parent))
    return next((step for step in steps if step is not None), None)


def find_config(source: Path) -> Mapping[str, Any] | None:
    """The config.json of the model in a checkpoint or in the run above it, None if there is none that can be read."""
    for place in places_of(source.absolute()):
        try:
            with translate_os_errors(place):
                if (place / CONFIG).is_file():
                    found = parse_json(read_small(place / CONFIG, _LIMIT), place / CONFIG)
                    return found if isinstance(found, dict) else None
        except (Corrupt, IOFailure, Unsafe):
            return None
    return None


def find_names(layout: Layout) -> dict[str, str]:
    """The checkpoint's names of the model's tensors by the model's own; {} where it cannot be told which these are."""
    if is_apart(layout):
        return {}
    try:
        return dict(find_weights(layout).came_from) if has_weights(layout) else {}
    except (Mismatch, Unsupported):
        return {}


def is_apart(layout: Layout) -> bool:
    """True for a directory of an optimizer, or of all but the model."""
    return layout.root.name.startswith(("optim", TRAINING))


def count_parameters(layout: Layout, weights: Mapping[str, str], ties: Iterable[Tie]) -> int | None:
    """The elements of the model's tensors, of tied ones once."""
    spare = {name for tie in ties for name in sorted(set(tie) & layout.tensors.keys())[1:]}
    counted = [layout.tensors[name].spec.numel for name in weights.values() if name not in spare]
    return sum(counted) if counted else None
