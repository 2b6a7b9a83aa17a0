"""Compare two checkpoints of the same step, group of state by group of state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from typing import Any

from ckptkit.engine.compare import compare_layouts
from ckptkit.engine.distance import Distance
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout
from ckptkit.plugins.resume_proof.states import GROUPS, CheckpointContents

_SLACK = 4  # times the distance of the two control runs: a third run may be further away than the second


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """How a group of state differs: `count` of its entries, `first` by name.

    `distance` is ||a - b|| / ||a|| of its tensors, 0 if only other entries differ. `values` are those of the first
    entry if it is a scalar on both sides.
    """

    group: str
    count: int
    first: str
    distance: float
    values: tuple[Any, Any] | None = None

    def describe_difference(self) -> str:
        if self.values is not None:
            one, two = (str(value)[:40] for value in self.values)
            return f"{self.group} (`{self.first}`: expected {one}, found {two})"
        return f"{self.group} ({self.count} different, first `{self.first}`)"


@dataclass(frozen=True, slots=True)
class ControlTolerance:
    """What two runs of the same command differ by: the distance of the tensors of each group, and volatile entries."""

    distances: Mapping[str, float] = field(default_factory=dict)
    volatile: frozenset[str] = frozenset()

    @property
    def is_exact(self) -> bool:
        """Return whether two runs are equal, bit for bit."""
        return not any(self.distances.values())

    @property
    def largest(self) -> float:
        return max(self.distances.values(), default=0.0)

    def is_within(self, difference: GroupDifference) -> bool:
        """Return whether a group differs by no more than two runs of the same command do, times a factor."""
        allowed = self.distances.get(difference.group, 0.0)
        return difference.values is None and allowed > 0 and difference.distance <= _SLACK * allowed


def group_differences(
    a: CheckpointContents,
    b: CheckpointContents,
    tolerance: ControlTolerance | None = None,
    groups: Iterable[str] = GROUPS,
) -> list[GroupDifference]:
    """Return the groups in which `b` differs from `a` beyond the tolerance, in the order of GROUPS."""
    tolerance = tolerance or ControlTolerance()
    measured = distance_by_differing_tensor(a, b)
    found = []
    for group in groups:
        names = dict.fromkeys((*a.names_in(group), *b.names_in(group)))
        different = [
            name
            for name in names
            if name not in tolerance.volatile and (name in measured or has_other_value(name, a, b))
        ]
        if not different:
            continue
        distance = relative_distance(measured[name] for name in different if name in measured)
        unmeasured = [name for name in different if name not in measured]
        first = unmeasured[0] if unmeasured else different[0]
        values = None
        if unmeasured and first in a.values and first in b.values:
            values = (a.values[first].value, b.values[first].value)
        elif unmeasured:
            distance = inf  # one side does not have it
        difference = GroupDifference(group, len(different), first, distance, values)
        if not tolerance.is_within(difference):
            found.append(difference)
    return found


def measure_control_tolerance(a: CheckpointContents, b: CheckpointContents) -> ControlTolerance:
    measured = distance_by_differing_tensor(a, b)
    distances = {
        group: relative_distance(measured[name] for name in measured if a.tensors[name].group == group)
        for group in GROUPS
    }
    volatile = {name for name in a.values.keys() | b.values.keys() if has_other_value(name, a, b)}
    return ControlTolerance({group: found for group, found in distances.items() if found}, frozenset(volatile))


def has_other_value(name: str, a: CheckpointContents, b: CheckpointContents) -> bool:
    """Return whether an entry that was not measured is on one side only, or a scalar with another value."""
    if name in a.values and name in b.values:
        one, two = a.values[name].value, b.values[name].value
        return type(one) is not type(two) or not (one == two or (one != one and two != two))  # noqa: PLR0124 - NaN is not itself
    if name in a.tensors and name in b.tensors:
        ours, theirs = a.tensors[name], b.tensors[name]
        return ours.layout.tensors[ours.name].spec != theirs.layout.tensors[theirs.name].spec
    return True


def distance_by_differing_tensor(a: CheckpointContents, b: CheckpointContents) -> dict[str, Distance]:
    """Return the distance of each tensor that both have in one shape and dtype and whose elements differ."""
    # Each pair of layouts is read once. `shared` has the names of its tensors in the states by those in the layouts.
    shared: dict[tuple[int, int], dict[str, str]] = {}
    layouts: dict[int, Layout] = {}
    for name, one in a.tensors.items():
        two = b.tensors.get(name)
        if two is None or one.layout.tensors[one.name].spec != two.layout.tensors[two.name].spec:
            continue
        layouts |= {id(one.layout): one.layout, id(two.layout): two.layout}
        shared.setdefault((id(one.layout), id(two.layout)), {})[one.name] = name
    found: dict[str, Distance] = {}
    for pair, names in shared.items():
        ours, theirs = (locate_all_chunks(with_tensors_only(layouts[key], names)) for key in pair)
        distances = compare_layouts(ours, theirs).distances
        for inner, name in names.items():
            if inner in distances and (distances[inner].different or distances[inner].strange):
                found[name] = distances[inner]
    return found


def with_tensors_only(layout: Layout, names: Iterable[str]) -> Layout:
    return replace(
        layout, tensors={name: layout.tensors[name] for name in names}, blobs={}, keys={}, twins={}, spares={}
    )


def relative_distance(measured: Iterable[Distance]) -> float:
    """Return ||a - b|| / ||a|| of tensors together; infinite for NaN on one side."""
    total = Distance()
    for distance in measured:
        total = total.merge(distance)
    if total.strange:
        return inf
    gap, size = sqrt(total.gap), sqrt(total.size_a)
    return 0.0 if not gap else gap / size if size and isfinite(size) else inf
