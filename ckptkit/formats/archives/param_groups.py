"""Read the groups of an optimizer's state dict, as torch has them. Opens no file.

Source: torch/optim/optimizer.py, `state_dict`: parameters are numbered through all groups, or go by their names.
"""

from __future__ import annotations

from typing import Any

from ckptkit.formats.archives.flatten import pairs_of


def numbers_of(value: Any) -> list[list[int]] | None:
    """Return the parameters' numbers in the groups of an optimizer's state dict; None for one that has names."""
    groups = dict(pairs_of(value) or ()).get("param_groups")
    if not isinstance(groups, list):
        return None
    numbers = [dict(pairs_of(group) or ()).get("params") for group in groups]
    if not all(isinstance(found, list) and all(type(n) is int for n in found) for found in numbers):
        return None
    return [list(found) for found in numbers if isinstance(found, list)]
