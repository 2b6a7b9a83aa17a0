"""List the families of names that are known, and turn a model's tensors into those that the Hub has. Each is one file.

What a layout holds is located first, since boxes are cut out of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptkit.checkpoints.families.family import Family
from ckptkit.checkpoints.families.rule import outline_of
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.families.torchtitan import TORCHTITAN
from ckptkit.checkpoints.families.translate import Translated
from ckptkit.errors import CkptError, Mismatch, Usage
from ckptkit.formats import locate, unpack
from ckptkit.layout import Layout

HUB, KEEP = "hub", "keep"
FAMILIES: tuple[Family, ...] = (TORCHTITAN,)


def family_of(names: Iterable[str], trainer: str | None = None) -> Family | None:
    """Return the family that names are of, None for those of the Hub and others that are not known.

    Of several that share names it is the one whose trainer wrote them.
    """
    outlines = {outline_of(name)[0] for name in names}
    told = [family for family in FAMILIES if family.is_told_by(outlines)]
    return next((family for family in told if family.trainer == trainer), next(iter(told), None))


def get_family(name: str) -> Family:
    """Return a family by its name. Raises `Usage` if there is none."""
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join((HUB, KEEP, *(family.name for family in FAMILIES)))
    raise Usage(f"there is no family of names `{name}`", hint=f"use one of {known}")


def check_names(name: str | None) -> None:
    """Raise `Usage` for a name that is neither a family's nor `HUB` or `KEEP`."""
    if name not in (None, HUB, KEEP):
        get_family(str(name))


@dataclass(frozen=True, slots=True)
class Renamed:
    """A layout under other names, the old names that each `came_from`, and those that were `dropped`."""

    layout: Layout
    came_from: dict[str, tuple[str, ...]]
    dropped: tuple[str, ...] = ()


def to_hub(layout: Layout, family: Family, sizes: Sizes) -> Renamed:
    """Return a model's tensors as the Hub has them.

    Raises `Mismatch` for one that no rule has a place for, or whose shape the config contradicts.
    """
    layout = locate(unpack(layout))
    found = translated(layout, family, sizes, is_to_hub=True)
    left = [name for name in found.unplaced if not family.drops_name(name)]
    if left:
        hint = "leave it out with --exclude, keep all names with --names keep, or say where it belongs with --map"
        message = f"no rule says what {family.name}'s tensor is called on the Hub, nor {len(left) - 1} others"
        raise Mismatch(message, path=layout.root, tensor=left[0], hint=hint)
    return Renamed(replace_tensors(layout, found), found.came_from, found.unplaced)


def from_hub(layout: Layout, family: Family, sizes: Sizes) -> Renamed:
    """Return tensors of the Hub as a family has them. Raises `Mismatch` for one that no rule has a place for."""
    layout = locate(unpack(layout))
    found = translated(layout, family, sizes, is_to_hub=False)
    if found.unplaced:
        message = f"no rule says what it is called in {family.name}, nor {len(found.unplaced) - 1} others"
        hint = "leave it out with --exclude, or say where it belongs with --map"
        raise Mismatch(message, path=layout.root, tensor=found.unplaced[0], hint=hint)
    return Renamed(replace_tensors(layout, found), found.came_from)


def translated(layout: Layout, family: Family, sizes: Sizes, *, is_to_hub: bool) -> Translated:
    """Return what the table of a family makes of a layout. An error says where the checkpoint lies."""
    try:
        return (family.to_hub if is_to_hub else family.from_hub)(layout.tensors, sizes)
    except CkptError as error:
        raise error.blame(path=layout.root)


def replace_tensors(layout: Layout, found: Translated) -> Layout:
    """Return the layout with other tensors in the place of its own; blobs are left behind."""
    return replace(layout, tensors=found.tensors, blobs={}, keys={}, twins={})
