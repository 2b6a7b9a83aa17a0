"""Open the weights of a checkpoint, and give them the names that are asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.evidence import gather
from ckptkit.checkpoints.part import Part
from ckptkit.conversion.selection import Edits
from ckptkit.errors import IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.layout import edits
from ckptkit.models.companions import Companions
from ckptkit.models.find_form import AskBase
from ckptkit.names.naming import AskedNames, name_weights
from ckptkit.names.prefixes import take_off_prefix
from ckptkit.names.weights import Weights, find_weights
from ckptkit.trainers import who_wrote


def open_weights(part: Part, asked: Edits) -> Weights:
    """Return the weights of a checkpoint as far as they are asked for, under their new names."""
    asked.check_globs([part.layout])
    found = find_weights(edits.select(part.layout, asked.admit))
    new_name = asked.renaming()
    came_from = {new_name(name): old for name, old in found.came_from.items()}
    return replace(found, layout=edits.rename(found.layout, new_name), came_from=came_from)


def without_prefix(found: Weights, companions: Companions, notes: list[str]) -> Weights:
    """Return the weights without the prefix before all names, and add to `notes` that it was taken off."""
    weights, remarks = take_off_prefix(found, companions.config)
    notes += [remark for remark in remarks if remark not in notes]
    return weights


def asker(base: str | None) -> AskBase:
    """Return a function that gives the names of the tensors in the base, None if it has none; asked when needed.

    What cannot be reached counts as none: the Hub, where only the config of a base is in the cache.
    """

    @cache
    def ask() -> frozenset[str] | None:
        try:
            return None if base is None else frozenset(Checkpoint.open(base).weights.layout.tensors)
        except (IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage):
            return None

    return ask


def name_one(weights: Weights, part: Part, asked: AskedNames, notes: list[str]) -> Weights:
    """Return the weights of one checkpoint under the names asked for, and add to `notes` what there is to say."""
    trainer = who_wrote(gather(part.path, (part.layout,)))
    weights, remarks = name_weights(weights, replace(asked, trainer=trainer))
    notes += [remark for remark in remarks if remark not in notes]
    return weights
