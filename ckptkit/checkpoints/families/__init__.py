"""List the families of names that are known, and turn a model's tensors from one into another. Each is one file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from ckptkit.checkpoints.families.family import Family
from ckptkit.checkpoints.families.rule import outline_of
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.families.torchtitan import TORCHTITAN
from ckptkit.checkpoints.families.translate import Translated, Turn
from ckptkit.errors import Mismatch, Usage
from ckptkit.layout import StoredTensor

HUB, KEEP = "hub", "keep"
FAMILIES: tuple[Family, ...] = (TORCHTITAN,)


def family_of(names: Iterable[str], trainer: str | None = None) -> Family | None:
    """Return the family that names are of, None for those of the Hub and others that are not known.

    Of several that share names it is the one whose trainer wrote them.
    """
    outlines = {outline_of(name)[0] for name in names}
    told = [family for family in FAMILIES if family.is_told_by(outlines)]
    return next((family for family in told if family.trainer == trainer), next(iter(told), None))


def step_before_family(names: Collection[str]) -> str:
    """Return the step that stands before all names of a family, as a wrapper puts it there; "" if none does."""
    first = next(iter(names), "").partition(".")[0] + "."
    if family_of(names) or not all(name.startswith(first) for name in names):
        return ""
    return first if family_of(name.removeprefix(first) for name in names) else ""


def get_family(name: str) -> Family | None:
    """Return a family by its name, None for the Hub. Raises `Usage` if there is none."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None and name != HUB:
        known = ", ".join((HUB, KEEP, *(family.name for family in FAMILIES)))
        raise Usage(f"there is no family of names `{name}`", hint=f"use one of {known}")
    return found


def check_names(name: str | None) -> None:
    """Raise `Usage` for a name that is neither a family's nor `HUB` or `KEEP`."""
    if name not in (None, KEEP):
        get_family(str(name))


def turn_between(here: Family | None, there: Family | None, sizes: Sizes) -> Turn:
    """Return the function that makes of tensors of one family those of another, of which None is the Hub.

    It takes tensors that are located, for boxes are cut out of their chunks, and raises `Mismatch` for one that has no
    place there, or whose shape the config contradicts.
    """

    def turn(tensors: Mapping[str, StoredTensor]) -> Translated:
        hub = Translated.of(tensors) if here is None else to_hub(here, tensors, sizes)
        if there is None:
            return hub
        found = from_hub(there, hub.tensors, sizes)
        came_from = {
            new: tuple(dict.fromkeys(chain.from_iterable(hub.came_from[name] for name in names)))
            for new, names in found.came_from.items()
        }
        return Translated(found.tensors, came_from, hub.unplaced)

    return turn


def to_hub(family: Family, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
    """Return tensors of a family as the Hub has them; `unplaced` are those that it has not.

    Raises `Mismatch` for any other that no rule has a place for.
    """
    found = family.to_hub(tensors, sizes)
    left = [name for name in found.unplaced if not family.drops_name(name)]
    if left:
        message = f"no rule says what {family.name}'s tensor is called on the Hub, nor {len(left) - 1} others"
        hint = "leave it out with --exclude, or keep all names with --names keep"
        raise Mismatch(message, tensor=left[0], hint=hint)
    return found


def from_hub(family: Family, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
    """Return tensors of the Hub as a family has them. Raises `Mismatch` for one that no rule has a place for."""
    found = family.from_hub(tensors, sizes)
    if found.unplaced:
        message = f"no rule says what it is called in {family.name}, nor {len(found.unplaced) - 1} others"
        raise Mismatch(message, tensor=found.unplaced[0], hint="leave it out with --exclude")
    return found
