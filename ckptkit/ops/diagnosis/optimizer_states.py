"""Find the parameters that an optimizer lists and has no state of: those that never had a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptkit.checkpoints.optimizer_keys import Optimizer, find_optimizers
from ckptkit.checkpoints.parameters import FLATTENED
from ckptkit.errors import Corrupt
from ckptkit.layout import KeyPath, Layout
from ckptkit.ops.diagnosis.case import Case
from ckptkit.ops.diagnosis.commands import reshard, rewrite
from ckptkit.ops.diagnosis.finding import Finding

_FLAG = "--complete-optimizer"


class Place(NamedTuple):
    """The place of an entry in an optimizer: the way to that, state or group, of which parameter, and what it is."""

    above: KeyPath
    kind: str
    parameter: str
    what: str


@dataclass
class States:
    """The states of an optimizer by name: what each parameter has, and the parameters that its groups list."""

    what: dict[str, set[str]] = field(default_factory=dict)
    listed: dict[str, None] = field(default_factory=dict)

    @property
    def without(self) -> list[str]:
        """Return the parameters that are listed and have nothing; none if no parameter has a state."""
        return [name for name in self.listed if name not in self.what] if self.what else []


def find_missing_states(case: Case) -> Iterator[Finding]:
    """Yield the parameters without a state, of an optimizer in shards, whose loader asks for a state of each.

    An optimizer that is one file of torch.save makes what it lacks by itself.
    """
    if not case.checkpoint.model_part.reader.is_sharded or case.adapted is not None:
        return
    for above, states in states_in(case.layout).items():
        for name in states.without:
            message = (
                "the optimizer lists it and has no state of it: it never had a gradient. Unless it is frozen, "
                "torch's load ends with `Missing key in checkpoint state_dict`"
            )
            yield Finding("optimizer_state", spell(above, name), message, mend(case))


def mend(case: Case) -> str:
    """Return the command that gives every parameter a state."""
    ranks = case.world_size or case.layout.world_size
    return reshard(case.checkpoint, ranks, _FLAG) if ranks else rewrite(case.checkpoint, _FLAG)


def states_in(layout: Layout) -> dict[KeyPath, States]:
    """Return the states of every optimizer that calls its parameters by name, by where it lies."""
    found: dict[KeyPath, States] = {}
    for name in layout.names:
        place = place_of(layout.key(name))
        if place is None:
            continue
        states = found.setdefault(place.above, States())
        if place.kind == "state":
            states.what.setdefault(place.parameter, set()).add(place.what)
        else:
            states.listed[place.parameter] = None
    for optimizer in named_optimizers(layout):
        states = found.setdefault(optimizer.above, States())
        states.listed |= {str(name): None for group in optimizer.groups for name in group}
    return {above: states for above, states in found.items() if states.listed}


def named_optimizers(layout: Layout) -> list[Optimizer]:
    """Return the optimizers whose groups list names."""
    try:
        return [optimizer for optimizer in find_optimizers(layout) if optimizer.is_named]
    except Corrupt:
        return []


def place_of(key: KeyPath) -> Place | None:
    """Return where an entry lies in an optimizer that calls its parameters by name; None for any other entry."""
    last = str(key[-1])
    if last.startswith(FLATTENED):
        kind, _, rest = last.partition(".")
        parameter, _, what = rest.rpartition(".")
        return Place(key[:-1], kind, parameter, what)
    at = max((i for i, step in enumerate(key[:-2]) if step == "state"), default=None)
    if at is None or str(key[at + 1]).isdecimal():
        return None
    return Place(key[:at], "state", str(key[at + 1]), ".".join(map(str, key[at + 2 :])))


def spell(above: KeyPath, name: str) -> str:
    """Return what the state of a parameter is called in the checkpoint."""
    return ".".join([*map(str, above), "state", name])
