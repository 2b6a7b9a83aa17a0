"""Give a model's tensors the names that are asked for: the Hub's, those of a family, or their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit import edits
from ckptkit.checkpoints.families import KEEP, family_of, get_family, turn_between
from ckptkit.checkpoints.families.complete import check_complete
from ckptkit.checkpoints.families.family import Family
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.families.training import translate_training
from ckptkit.checkpoints.families.translate import Translated, Turn
from ckptkit.checkpoints.weights import OF_ONE, Weights, find_prefix, find_weights
from ckptkit.errors import CkptError, Mismatch
from ckptkit.formats import locate, unpack
from ckptkit.layout import KeyPath, Layout, Spec

Config = Mapping[str, Any] | None


def name_weights(found: Weights, config: Config, names: str, trainer: str | None) -> tuple[Weights, list[str]]:
    """Return weights under the names of a family, or of the Hub, and words on it.

    Raises `Mismatch` where a config.json is needed and none is there, or a tensor has no place in the family.
    """
    change = None if names == KEEP else find_change(found, config, names, trainer)
    if change is None:
        return found, []
    here, there, turn = change
    layout = locate(unpack(found.layout))
    made = turn_in(layout, turn)
    if there is None and config is not None:
        check_complete(made.tensors, Sizes(config), layout.root)
    came_from = {
        new: " + ".join(dict.fromkeys(found.came_from[old] for old in olds)) for new, olds in made.came_from.items()
    }
    named = replace(layout, tensors=made.tensors, blobs={}, keys={}, twins={})
    return replace(found, layout=named, came_from=came_from), describe(here, there, layout, made)


def name_training(layout: Layout, config: Config, names: str, trainer: str | None) -> tuple[Layout, list[str]]:
    """Return a checkpoint whose parameters have the names of a family, in the optimizer too, and words on it."""
    if names == KEEP:
        return layout, []
    change = find_change(find_weights(layout), config, names, trainer)
    if change is None:
        return layout, []
    here, there, turn = change
    layout = locate(unpack(layout))
    found = find_weights(layout)
    try:
        named, made = translate_training(layout, found, find_prefix(layout), turn)
    except CkptError as error:
        raise error.blame(path=layout.root) from None
    notes = describe(here, there, found.layout, made)
    left = {name for name in named.blobs if here is not None and is_dropped(here, named.key(name))}
    if left:
        notes.append(f"left out {len(left)} entries of layers as they were called before, such as `{min(left)}`")
    return edits.select(named, lambda name: name not in left), notes


def is_dropped(family: Family, key: KeyPath) -> bool:
    """Return whether an entry that is no tensor belongs to a layer of a family, and means nothing by other names."""
    return family.drops_name(str(key[-1]).partition(OF_ONE)[0])


def find_change(
    found: Weights, config: Config, names: str, trainer: str | None
) -> tuple[Family | None, Family | None, Turn] | None:
    """Return the family that weights are of, the one that is asked for and the way between; None if they are the same.

    A family that is None is the Hub.
    """
    weights = found.layout
    here, there = family_of(weights.tensors, trainer), get_family(names)
    if here is there:
        return None
    if config is None:
        whose = " and ".join(family.name for family in (here, there) if family)
        message = f"how names of {whose} and of the Hub become each other, config.json says, and none is here"
        hint = "give --base MODEL, with the config.json of this architecture, or leave the names with --names keep"
        raise Mismatch(message, path=weights.root, tensor=next(iter(weights.tensors)), hint=hint)
    sizes = Sizes(config)
    if here is not None:
        try:
            here.check(found.whole, sizes)
        except CkptError as error:
            raise error.blame(path=weights.root) from None
    return here, there, turn_between(here, there, sizes)


def turn_in(layout: Layout, turn: Turn) -> Translated:
    """Return what is made of the tensors of a layout. An error says where they lie."""
    try:
        return turn(layout.tensors)
    except CkptError as error:
        raise error.blame(path=layout.root) from None


def describe(here: Family | None, there: Family | None, before: Layout, made: Translated) -> list[str]:
    """Return what there is to say of new names."""
    count = len({old for olds in made.came_from.values() for old in olds})
    one, other = (family.name if family else "the Hub" for family in (here, there))
    notes = [f"{count} tensors as {one} calls them became {len(made.came_from)} as {other} does"]
    if made.unplaced:
        notes.append(f"left out {len(made.unplaced)} that {other} has not, such as `{made.unplaced[0]}`")
    notes += [describe_padding(old, before.tensors[old].spec, spec) for old, spec in find_cropped(before, made)]
    return notes


def find_cropped(before: Layout, made: Translated) -> Iterator[tuple[str, Spec]]:
    """Yield the name of each tensor that became one of less rows, and what it is now."""
    became = Counter(old for olds in made.came_from.values() for old in olds)
    for new, olds in made.came_from.items():
        spec = made.tensors[new].spec
        if len(olds) == 1 and became[olds[0]] == 1 and spec.numel < before.tensors[olds[0]].spec.numel:
            yield olds[0], spec


def describe_padding(name: str, before: Spec, now: Spec) -> str:
    """Return what there is to say of rows that were left out."""
    left = before.shape[0] - now.shape[0]
    return f"left out the last {left} of the {before.shape[0]} rows of `{name}`, which pad the vocabulary"
