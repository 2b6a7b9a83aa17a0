"""Give a model's tensors the names that are asked for: the Hub's, those of a family, or their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.checkpoints.families import KEEP, family_of, get_family, turn_between
from ckptkit.checkpoints.families.family import Family
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.families.training import translate_training
from ckptkit.checkpoints.families.translate import Translated, Turn
from ckptkit.checkpoints.weights import Weights, find_prefix, find_weights
from ckptkit.errors import CkptError, Mismatch
from ckptkit.formats import locate, unpack
from ckptkit.layout import Layout

Config = Mapping[str, Any] | None


def name_weights(found: Weights, config: Config, names: str, trainer: str | None) -> tuple[Weights, list[str]]:
    """Return weights under the names of a family, or of the Hub, and words on it.

    Raises `Mismatch` where a config.json is needed and none is there, or a tensor has no place in the family.
    """
    change = None if names == KEEP else find_change(found.layout, config, names, trainer)
    if change is None:
        return found, []
    here, there, turn = change
    layout = locate(unpack(found.layout))
    made = turn_in(layout, turn)
    came_from = {
        new: " + ".join(dict.fromkeys(found.came_from[old] for old in olds)) for new, olds in made.came_from.items()
    }
    named = replace(layout, tensors=made.tensors, blobs={}, keys={}, twins={})
    return replace(found, layout=named, came_from=came_from), describe(here, there, made)


def name_training(layout: Layout, config: Config, names: str, trainer: str | None) -> tuple[Layout, list[str]]:
    """Return a checkpoint whose parameters have the names of a family, in the optimizer too, and words on it."""
    if names == KEEP:
        return layout, []
    change = find_change(find_weights(layout).layout, config, names, trainer)
    if change is None:
        return layout, []
    here, there, turn = change
    layout = locate(unpack(layout))
    try:
        named, made = translate_training(layout, find_weights(layout), find_prefix(layout), turn)
    except CkptError as error:
        raise error.blame(path=layout.root) from None
    return named, describe(here, there, made)


def find_change(
    weights: Layout, config: Config, names: str, trainer: str | None
) -> tuple[Family | None, Family | None, Turn] | None:
    """Return the family that weights are of, the one that is asked for and the way between; None if they are the same.

    A family that is None is the Hub.
    """
    here, there = family_of(weights.tensors, trainer), get_family(names)
    if here is there:
        return None
    if config is None:
        whose = " and ".join(family.name for family in (here, there) if family)
        message = f"how names of {whose} and of the Hub become each other, config.json says, and none is here"
        hint = "give --base MODEL, with the config.json of this architecture, or leave the names with --names keep"
        raise Mismatch(message, path=weights.root, tensor=next(iter(weights.tensors)), hint=hint)
    return here, there, turn_between(here, there, Sizes(config))


def turn_in(layout: Layout, turn: Turn) -> Translated:
    """Return what is made of the tensors of a layout. An error says where they lie."""
    try:
        return turn(layout.tensors)
    except CkptError as error:
        raise error.blame(path=layout.root) from None


def describe(here: Family | None, there: Family | None, made: Translated) -> list[str]:
    """Return what there is to say of new names."""
    before = len({old for olds in made.came_from.values() for old in olds})
    one, other = (family.name if family else "the Hub" for family in (here, there))
    notes = [f"{before} tensors as {one} calls them became {len(made.came_from)} as {other} does"]
    if made.unplaced:
        notes.append(f"left out {len(made.unplaced)} that {other} has not, such as `{made.unplaced[0]}`")
    return notes
