"""Check that a model under the Hub's names has the layers and experts that its config calls for, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.errors import Mismatch

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\..*")
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]{1,9})\.(.*)")
_MORE = "num_nextn_predict_layers"  # behind the others: they predict further tokens


def check_complete(names: Iterable[str], sizes: Sizes, path: Path) -> None:
    """Raise `Mismatch` for a layer or an expert that is missing, or that the config knows nothing of."""
    layers: set[int] = set()
    experts: dict[tuple[str, str], set[int]] = {}
    for name in names:
        layer, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        if layer:
            layers.add(int(layer[1]))
        if expert:
            experts.setdefault((expert[1], expert[3]), set()).add(int(expert[2]))
    more = sizes.text.get(_MORE)
    if layers:
        check_numbers(layers, sizes.find("layers"), more if type(more) is int else 0, "model.layers.{}", path)
    for (above, below), numbers in experts.items():
        check_numbers(numbers, sizes.find("experts"), 0, f"{above}.{{}}.{below}", path)


def check_numbers(found: set[int], wanted: int | None, more: int, name: str, path: Path) -> None:
    """Raise `Mismatch` unless numbers are those below `wanted`, and up to so many `more`; None takes any."""
    if wanted is None:
        return
    missing = next((number for number in range(wanted) if number not in found), None)
    if missing is not None:
        raise Mismatch(
            f"missing: config.json calls for {wanted}, {len(found)} are here", path=path, tensor=name.format(missing)
        )
    if max(found) >= wanted + more:
        message = f"config.json calls for {wanted} of them only"
        hint = "is the config.json that of another model?"
        raise Mismatch(message, path=path, tensor=name.format(max(found)), hint=hint)
