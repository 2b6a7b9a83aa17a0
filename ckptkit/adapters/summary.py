"""Summarize the adapters of a checkpoint: their size, modules and base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptkit.adapters.config import AdapterConfig, find_adapter_config, is_sound
from ckptkit.adapters.find import Adapted, Adapter, find_adapters
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.names.weights import find_weights


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """An adapter at a glance.

    `rows` are those of its first matrices, each once: the ranks, but of experts times their number. `alpha` and `base`
    are what its config says, the file `config`; None without one. `has_base` says whether the base lies beside it.
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
    return tuple(look(adapter, adapted, part.path) for adapter in adapted.adapters) if adapted else ()


def look(adapter: Adapter, adapted: Adapted, path: Path) -> InspectedAdapter:
    """Look at one adapter, and at its config if that can be read."""
    config = readable_config(path, adapter.name)
    alpha = config.values.get("lora_alpha") if config else None
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


def readable_config(path: Path, name: str) -> AdapterConfig | None:
    """Return the config of an adapter, None if there is none that can be read."""
    try:
        return find_adapter_config(path, name)
    except Corrupt:
        return None
