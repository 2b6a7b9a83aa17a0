"""Find optimizer state that a loader needs and the checkpoint lacks, and parameter groups that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.checkpoints.optimizers.keys import IDS, NAMES, Optimizer, find_optimizers
from ckptkit.checkpoints.optimizers.missing_states import States, find_states, flattened_states
from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, Fix, reshard, rewrite
from ckptkit.errors import Corrupt
from ckptkit.layout import Layout
from ckptkit.words import count

_MISNAMED = ("prefixed_state", "prefixed_weight", "unknown_parameter")


def find_missing_states(case: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters without a state in a sharded checkpoint, whose loader asks for the state of every parameter.

    For a file of torch.save, `doctor` adds a note instead: only some loaders ask for every state.
    """
    if case.checkpoint.model_component.reader.is_sharded and case.adapted is None:
        yield from list_missing_states(case)


def list_missing_states(case: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters without optimizer state, for any format."""
    is_sharded = case.checkpoint.model_component.reader.is_sharded
    error_text = "`Missing key in checkpoint state_dict`" if is_sharded else "`Missing optimizer state for parameter`"
    for states in named_states(case.layout):
        for name in without_state(states) if not is_misnamed(case, states) else ():
            message = (
                "the optimizer has no state for this parameter because it never received a gradient; "
                f"unless it is frozen, torch's load fails with {error_text}"
            )
            key = ".".join([*map(str, states.above), "state", name])
            yield Finding("optimizer_state", key, message, complete_fix(case))


def is_misnamed(case: LoadTarget, states: States) -> bool:
    """Return whether the optimizer has states under unknown names, perhaps of the parameters without a state."""
    above = f"{'.'.join(map(str, states.above))}.state."
    is_unknown = any(one.code in _MISNAMED and f"{one.tensor}".startswith(above) for one in case.inconsistencies)
    return is_unknown or bool(states.strays)


def complete_fix(case: LoadTarget) -> Fix:
    """Return the command that gives every parameter a state."""
    is_sharded = case.checkpoint.model_component.reader.is_sharded
    ranks = (case.world_size or case.layout.world_size) if is_sharded else None
    if ranks:
        return reshard(case.checkpoint, ranks, complete_optimizer=True)
    return rewrite(case.checkpoint, complete_optimizer=True)


def named_states(layout: Layout) -> list[States]:
    """Return the states of the optimizers that identify parameters by name and have valid groups."""
    try:
        states_list = find_states(layout)
    except Corrupt:
        states_list = list(flattened_states(layout))
    return [states for states in states_list if states.optimizer is None or states.optimizer.is_named]


def without_state(states: States) -> list[str]:
    """Return the listed parameters that have no state; [] if no parameter has one."""
    return states.lacking if states.of else []


def find_groups(case: LoadTarget) -> Iterator[Finding]:
    """Yield the optimizers whose groups differ from the other checkpoint's, or that use indices where it uses names."""
    if case.like is None:
        return
    pairs = zip(optimizers_in(case.layout), optimizers_in(case.like.layout), strict=False)
    for ours, theirs in pairs:
        if ours.is_named != theirs.is_named:
            our_keys, their_keys = (NAMES if one.is_named else IDS for one in (ours, theirs))
            message = f"expected {their_keys} of parameters as in {case.like.path}, found {our_keys}"
            yield Finding("optimizer_keys", ours.name, message, rewrite(case.checkpoint, optimizer_keys=their_keys))
        else:
            yield from find_difference(ours, theirs, case.like.path)


def find_difference(ours: Optimizer, theirs: Optimizer, other: Path) -> Iterator[Finding]:
    """Yield the first difference between the parameter groups of two optimizers."""
    our_sizes, their_sizes = ([len(group) for group in one.groups] for one in (ours, theirs))
    if len(our_sizes) != len(their_sizes):
        message = (
            f"expected {count(len(their_sizes), 'parameter group')} as in {other}, found {len(our_sizes)}: "
            "torch fails with `loaded state dict has a different number of parameter groups`"
        )
        yield Finding("groups", ours.name, message)
    elif our_sizes != their_sizes:
        sizes, found = (", ".join(map(str, group_sizes)) for group_sizes in (their_sizes, our_sizes))
        message = (
            f"expected groups of {sizes} parameters as in {other}, found {found}: "
            "torch fails with `loaded state dict contains a parameter group that doesn't match the size`"
        )
        yield Finding("groups", ours.name, message)
    elif ours.is_named and (moved := find_moved(ours, theirs)):
        name, one, two = moved
        message = f"expected the parameter in group {two} as in {other}, found it in group {one}"
        yield Finding("groups", f"{ours.name}.{name}", message)


def find_moved(ours: Optimizer, theirs: Optimizer) -> tuple[str, int, int] | None:
    """Return the first parameter that is in another group, with its group here and there."""
    group_there = {name: number for number, group in enumerate(theirs.groups) for name in group}
    moved = (
        (name, number, group_there[name])
        for number, group in enumerate(ours.groups)
        for name in group
        if group_there.get(name, number) != number
    )
    return next(moved, None)


def optimizers_in(layout: Layout) -> list[Optimizer]:
    """Return the optimizers that have groups; [] if the groups are invalid."""
    try:
        return find_optimizers(layout)
    except Corrupt:
        return []
