"""Decide whether an optimizer is written with names or with numbers for its parameters, and which they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.conversion.options import ConvertOptions
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import get_format
from ckptkit.layout import Layout
from ckptkit.optimizers.keys import IDS, NAMES, Optimizer, find_optimizers, numbers_of, rekeyed
from ckptkit.optimizers.parameter_order import find_names


@dataclass(frozen=True, slots=True)
class Keyed:
    """An optimizer whose parameters get other names or numbers: `members` has the new of each old."""

    optimizer: Optimizer
    members: Mapping[Any, str | int]

    def edit(self, layout: Layout) -> Layout:
        """Return a layout with the new ones, wherever the optimizer occurs in it."""
        return rekeyed(layout, self.optimizer, self.members)


def key_optimizers(
    checkpoint: Checkpoint, layouts: Sequence[Layout], options: ConvertOptions, notes: list[str]
) -> list[list[Keyed]]:
    """Return the optimizers in each layout that get other names or numbers; add to `notes` what there is to say.

    Raises `Unsupported` where names were asked for and are not certain, or numbers of an optimizer without groups.
    """
    wanted = options.optimizer_keys
    if wanted is None:
        becomes_shards = options.writer.is_sharded
        wants = [NAMES if becomes_shards and not get_format(each.format).is_sharded else None for each in layouts]
    else:
        wants = [wanted] * len(layouts)
    found = [find_optimizers(layout) if want else [] for layout, want in zip(layouts, wants, strict=True)]
    if wanted is not None and not any(found):
        message = "no optimizer with groups of parameters is here, as torch's own have them"
        raise Unsupported(message, path=checkpoint.path, hint="leave --optimizer-keys out")
    return [
        [keyed for optimizer in optimizers for keyed in key(checkpoint, layout, optimizer, options, notes)]
        for layout, optimizers in zip(layouts, found, strict=True)
    ]


def key(
    checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, options: ConvertOptions, notes: list[str]
) -> list[Keyed]:
    """Return an optimizer with the keys that are wanted; nothing if it has them."""
    if options.optimizer_keys == IDS:
        return [] if optimizer.is_numbered else [Keyed(optimizer, numbers_of(layout, optimizer))]
    must = options.optimizer_keys == NAMES
    return [] if optimizer.is_named else name(checkpoint, layout, optimizer, notes, must=must)


def name(checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, notes: list[str], *, must: bool) -> list[Keyed]:
    """Return an optimizer with names for its numbers; nothing if these are not certain, unless they `must` be."""
    try:
        members = find_names(layout, optimizer, checkpoint.model_part.layout, checkpoint.model_part.path)
    except (Mismatch, Unsupported) as error:
        if must:
            raise
        why = f"{error.tensor}: {error.message}" if error.tensor else error.message
        notes.append(f"`{optimizer.name}` keeps numbers for its parameters, for their names are not certain ({why})")
        return []
    notes.append(f"`{optimizer.name}` has names for its {len(members)} parameters: one order fits all shapes")
    return [Keyed(optimizer, members)]
