"""Find what a loader misses in an optimizer: missing states, and other parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.checkpoints.optimizers.keys import IDS, NAMES, Optimizer, find_optimizers
from ckptkit.checkpoints.optimizers.missing_states import States, find_states, flattened
from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, Fix, reshard, rewrite
from ckptkit.errors import Corrupt
from ckptkit.layout import KeyPath, Layout
from ckptkit.words import count

_MISNAMED = ("prefixed_state", "prefixed_weight", "unknown_parameter")


def find_missing_states(case: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters without a state, of an optimizer in shards, whose loader asks for a state of each.

    Of one in a file of torch.save a note is made: whether its loader asks for all depends on which it is.
    """
    if case.checkpoint.model_component.reader.is_sharded and case.adapted is None:
        yield from list_missing_states(case)


def list_missing_states(case: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters without a state, however the optimizer is saved."""
    is_sharded = case.checkpoint.model_component.reader.is_sharded
    words = "`Missing key in checkpoint state_dict`" if is_sharded else "`Missing optimizer state for parameter`"
    for states in named_states(case.layout):
        for name in without_state(states) if not is_misnamed(case, states) else ():
            message = (
                "the optimizer has no state for this parameter because it never received a gradient; "
                f"unless it is frozen, torch's load fails with {words}"
            )
            yield Finding("optimizer_state", spell(states.above, name), message, complete(case))


def is_misnamed(case: LoadTarget, states: States) -> bool:
    """Return whether the optimizer has states under unknown names: they may be those that parameters lack."""
    above = f"{'.'.join(map(str, states.above))}.state."
    is_unknown = any(one.code in _MISNAMED and f"{one.tensor}".startswith(above) for one in case.inconsistencies)
    return is_unknown or bool(states.strays)


def complete(case: LoadTarget) -> Fix:
    """Return the command that gives every parameter a state."""
    is_sharded = case.checkpoint.model_component.reader.is_sharded
    ranks = (case.world_size or case.layout.world_size) if is_sharded else None
    if ranks:
        return reshard(case.checkpoint, ranks, complete_optimizer=True)
    return rewrite(case.checkpoint, complete_optimizer=True)


def named_states(layout: Layout) -> list[States]:
    """Return the states of the optimizers that call their parameters by name, and have groups that make sense."""
    try:
        found = find_states(layout)
    except Corrupt:
        found = list(flattened(layout))
    return [states for states in found if states.optimizer is None or states.optimizer.is_named]


def without_state(states: States) -> list[str]:
    """Return the parameters that are listed and have no state; none if no parameter has one."""
    return states.lacking if states.of else []


def spell(above: KeyPath, name: str) -> str:
    return ".".join([*map(str, above), "state", name])


def find_groups(case: LoadTarget) -> Iterator[Finding]:
    """Yield the optimizers that list their parameters in other groups, or by numbers where the other has names."""
    if case.like is None:
        return
    pairs = zip(optimizers_in(case.layout), optimizers_in(case.like.layout), strict=False)
    for ours, theirs in pairs:
        if ours.is_named != theirs.is_named:
            here, there = (NAMES if one.is_named else IDS for one in (ours, theirs))
            message = f"expected {there} of parameters as in {case.like.path}, found {here}"
            yield Finding("optimizer_keys", ours.name, message, rewrite(case.checkpoint, optimizer_keys=there))
        else:
            yield from find_difference(ours, theirs, case.like.path)


def find_difference(ours: Optimizer, theirs: Optimizer, other: Path) -> Iterator[Finding]:
    """Yield the first difference of two optimizers' groups."""
    here, there = ([len(group) for group in one.groups] for one in (ours, theirs))
    if len(here) != len(there):
        message = (
            f"it has {count(len(here), 'parameter group')} here, and {len(there)} in {other}: "
            "torch fails with `loaded state dict has a different number of parameter groups`"
        )
        yield Finding("groups", ours.name, message)
    elif here != there:
        message = (
            f"expected groups of {', '.join(map(str, there))} parameters as in {other}, found "
            f"{', '.join(map(str, here))}: "
            "torch fails with `loaded state dict contains a parameter group that doesn't match the size`"
        )
        yield Finding("groups", ours.name, message)
    elif ours.is_named and (moved := find_moved(ours, theirs)):
        name, one, two = moved
        yield Finding(
            "groups",
            f"{ours.name}.{name}",
            f"expected the parameter in group {two} as in {other}, found it in group {one}",
        )


def find_moved(ours: Optimizer, theirs: Optimizer) -> tuple[str, int, int] | None:
    """Return the first parameter that is in another group, with both."""
    places = {name: number for number, group in enumerate(theirs.groups) for name in group}
    moved = (
        (name, number, places[name])
        for number, group in enumerate(ours.groups)
        for name in group
        if places.get(name, number) != number
    )
    return next(moved, None)


def optimizers_in(layout: Layout) -> list[Optimizer]:
    """Return the optimizers with groups; none where these make no sense."""
    try:
        return find_optimizers(layout)
    except Corrupt:
        return []
