"""Summarize the adapters of a checkpoint: their size, modules and base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.adapters.config import AdapterConfig, find_adapter_config, is_sound
from ckptkit.adapters.find import Adapted, Adapter, find_adapters
from ckptkit.adapters.trainer_names import trainer_names_in
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Corrupt, Mismatch, NotACheckpoint, Unsupported
from ckptkit.layout import Layout
from ckptkit.models.names.weights import find_weights


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """An adapter at a glance.

    `rows` are those of its first matrices, each once: the ranks, but of experts times their number. `alpha` and `base`
    are what its config says, the file `config`; None without one, but `alpha` may be in its trainer's own files.
    `has_base` says whether the base lies beside it.
    """

    name: str
    method: str
    rows: tuple[int, ...]
    alpha: float | None
    targets: tuple[str, ...]
    modules: int
    replaced: tuple[str, ...]
    parameters: int
    nbytes: int
    base: str | None
    has_base: bool
    config: Path | None


def inspect_adapters(part: Component) -> tuple[InspectedAdapter, ...]:
    """Return the adapters in the part with the model; () where there are none, or none that are known."""
    try:
        adapted = find_adapters(find_weights(part.layout).layout)
    except (Corrupt, Mismatch, Unsupported):
        return ()
    return tuple(look(adapter, adapted, part) for adapter in adapted.adapters) if adapted else ()


def look(adapter: Adapter, adapted: Adapted, part: Component) -> InspectedAdapter:
    """Look at one adapter, and at its config, or what its trainer saved of it, if that can be read."""
    config = readable_config(part.path, adapter.name)
    alpha = (config.values if config else trained_values(part.layout)).get("lora_alpha")
    is_number = isinstance(alpha, int | float) and is_sound(alpha)
    return InspectedAdapter(
        adapter.name,
        adapter.method,
        tuple(sorted(adapter.rows)),
        alpha if is_number else None,
        adapter.targets,
        len(adapter.modules),
        adapter.replaced,
        sum(spec.numel for spec in adapter.specs.values()),
        sum(spec.nbytes for spec in adapter.specs.values()),
        config.base if config else None,
        bool(adapted.base),
        config.path if config else None,
    )


def trained_values(saved: Layout) -> Mapping[str, Any]:
    """Return what its trainer saved of the one adapter of a checkpoint; {} if nothing can be read."""
    try:
        names = trainer_names_in(saved.tensors)
        return names.trainer_values(saved)[1] if names else {}
    except (Corrupt, NotACheckpoint, Unsupported):
        return {}


def readable_config(path: Path, name: str) -> AdapterConfig | None:
    """Return the config of an adapter, None if there is none that can be read."""
    try:
        return find_adapter_config(path, name)
    except Corrupt:
        return None
