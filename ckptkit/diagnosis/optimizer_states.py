"""Find the parameters that an optimizer lists and has no state of: those that never had a gradient."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import reshard, rewrite
from ckptkit.diagnosis.finding import Finding
from ckptkit.errors import Corrupt
from ckptkit.layout import KeyPath, Layout
from ckptkit.optimizers.missing_states import States, find_states, flattened

_FLAG = "--complete-optimizer"


def find_missing_states(case: Case) -> Iterator[Finding]:
    """Yield the parameters without a state, of an optimizer in shards, whose loader asks for a state of each.

    Of one in a file of torch.save a note is made: whether its loader asks for all depends on which it is.
    """
    if case.checkpoint.model_part.reader.is_sharded and case.adapted is None:
        yield from list_missing_states(case)


def list_missing_states(case: Case) -> Iterator[Finding]:
    """Yield the parameters without a state, however the optimizer is saved."""
    is_sharded = case.checkpoint.model_part.reader.is_sharded
    words = "`Missing key in checkpoint state_dict`" if is_sharded else "`Missing optimizer state for parameter`"
    for states in named_states(case.layout):
        for name in without_state(states):
            message = (
                "the optimizer lists it and has no state of it: it never had a gradient. Unless it is frozen, "
                f"torch's load ends with {words}"
            )
            yield Finding("optimizer_state", spell(states.above, name), message, mend(case))


def mend(case: Case) -> str:
    """Return the command that gives every parameter a state."""
    is_sharded = case.checkpoint.model_part.reader.is_sharded
    ranks = (case.world_size or case.layout.world_size) if is_sharded else None
    return reshard(case.checkpoint, ranks, _FLAG) if ranks else rewrite(case.checkpoint, _FLAG)


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
