"""Give a model's weights the names that are asked for: the Hub's, those of a family, or their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.checkpoints.families import HUB, KEEP, Renamed, family_of, from_hub, get_family, to_hub
from ckptkit.checkpoints.families.family import Family
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.weights import Weights
from ckptkit.errors import Mismatch
from ckptkit.layout import Layout


def name_weights(
    found: Weights, config: Mapping[str, Any] | None, names: str, trainer: str | None
) -> tuple[Weights, list[str]]:
    """Return weights under the names of a family, `HUB` for the Hub's, and words on it.

    Raises `Mismatch` where a config.json is needed and none is there, or a tensor has no place in the family.
    """
    if names == KEEP:
        return found, []
    family = family_of(found.layout.tensors, trainer)
    wanted = None if names == HUB else get_family(names)
    if family is wanted:
        return found, []
    notes = []
    for one, turn in ((family, to_hub), (wanted, from_hub)):
        if one is not None:
            renamed = turn(found.layout, one, Sizes(require_config(found.layout, one, config)))
            found = follow(found, renamed)
            notes += describe(one, renamed, is_to_hub=turn is to_hub)
    return found, notes


def require_config(layout: Layout, family: Family, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the config. Raises `Mismatch` if there is none."""
    if config is None:
        message = f"the names are {family.name}'s; how its tensors become the Hub's, the model's config.json says"
        hint = "give --base MODEL with the config.json of this architecture, or leave the names with --names keep"
        raise Mismatch(message, path=layout.root, tensor=next(iter(layout.tensors)), hint=hint)
    return config


def follow(found: Weights, renamed: Renamed) -> Weights:
    """Return weights that were renamed, with the names that they have in the checkpoint."""
    came_from = {
        new: " + ".join(dict.fromkeys(found.came_from[old] for old in olds)) for new, olds in renamed.came_from.items()
    }
    return replace(found, layout=renamed.layout, came_from=came_from)


def describe(family: Family, renamed: Renamed, *, is_to_hub: bool) -> list[str]:
    """Return what there is to say of new names."""
    before = len({old for olds in renamed.came_from.values() for old in olds})
    one, other = (family.name, "the Hub") if is_to_hub else ("the Hub", family.name)
    notes = [f"{before} tensors as {one} calls them became {len(renamed.came_from)} as {other} does"]
    if renamed.dropped:
        notes.append(f"left out {len(renamed.dropped)} that {other} has not, such as `{renamed.dropped[0]}`")
    return notes
