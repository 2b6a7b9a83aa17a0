"""Compare two checkpoints of the same step, group of state by group of state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from typing import Any

from ckptkit.engine.compare import compare_layouts
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout
from ckptkit.layout.distance import Distance
from ckptkit.plugins.resume_proof.groups import GROUPS
from ckptkit.plugins.resume_proof.states import CheckpointContents

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
        """Return one phrase: how many entries differ, and the first."""
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
    measured = measure_tensors(a, b)
    found = []
    for group in groups:
        difference = find_group_difference(group, a, b, measured, tolerance)
        if difference is not None and not tolerance.is_within(difference):
            found.append(difference)
    return found


def measure_control_tolerance(a: CheckpointContents, b: CheckpointContents) -> ControlTolerance:
    """Return what two runs of the same command differ by."""
    measured = measure_tensors(a, b)
    distances = {
        group: relative_distance(measured[name] for name in measured if a.tensors[name].group == group)
        for group in GROUPS
    }
    volatile = {name for name in a.values.keys() | b.values.keys() if has_other_value(name, a, b)}
    return ControlTolerance({group: found for group, found in distances.items() if found}, frozenset(volatile))


def find_group_difference(
    group: str,
    a: CheckpointContents,
    b: CheckpointContents,
    measured: Mapping[str, Distance],
    tolerance: ControlTolerance,
) -> GroupDifference | None:
    """Return how one group differs, None if it does not."""
    names = [name for name in dict.fromkeys((*a.names_in(group), *b.names_in(group))) if name not in tolerance.volatile]
    different = [name for name in names if name in measured or has_other_value(name, a, b)]
    if not different:
        return None
    distance = relative_distance(measured[name] for name in different if name in measured)
    unmeasured = [name for name in different if name not in measured]
    first = unmeasured[0] if unmeasured else different[0]
    if unmeasured and first in a.values and first in b.values:
        return GroupDifference(group, len(different), first, distance, (a.values[first].value, b.values[first].value))
    if unmeasured:
        distance = inf  # one side does not have it
    return GroupDifference(group, len(different), first, distance)


def has_other_value(name: str, a: CheckpointContents, b: CheckpointContents) -> bool:
    """Return whether an entry that was not measured is on one side only, or a scalar with another value."""
    if name in a.values and name in b.values:
        return not is_same_scalar(a.values[name].value, b.values[name].value)
    if name in a.tensors and name in b.tensors:
        one, two = (state.tensors[name] for state in (a, b))
        return one.layout.tensors[one.name].spec != two.layout.tensors[two.name].spec
    return True


def is_same_scalar(one: Any, two: Any) -> bool:
    return type(one) is type(two) and (one == two or (one != one and two != two))  # noqa: PLR0124 - NaN is not itself


def measure_tensors(a: CheckpointContents, b: CheckpointContents) -> dict[str, Distance]:
    """Return the distance of each tensor that both have in one shape and dtype and whose elements differ."""
    found: dict[str, Distance] = {}
    for one, two, names in comparable_layouts(a, b):
        distances = compare_layouts(locate_all_chunks(one), locate_all_chunks(two)).distances
        differing = {inner: distance for inner, distance in distances.items() if distance.different or distance.strange}
        found |= {name: differing[inner] for inner, name in names.items() if inner in differing}
    return found


def comparable_layouts(a: CheckpointContents, b: CheckpointContents) -> Iterator[tuple[Layout, Layout, dict[str, str]]]:
    """Return pairs of layouts with the same tensors, and the names of these in the states by those in the layouts."""
    shared: dict[tuple[int, int], dict[str, str]] = {}
    layouts: dict[int, Layout] = {}
    for name, one in a.tensors.items():
        two = b.tensors.get(name)
        if two is None or one.layout.tensors[one.name].spec != two.layout.tensors[two.name].spec:
            continue
        layouts |= {id(one.layout): one.layout, id(two.layout): two.layout}
        shared.setdefault((id(one.layout), id(two.layout)), {})[one.name] = name
    for (first, second), names in shared.items():
        yield with_tensors_only(layouts[first], names), with_tensors_only(layouts[second], names), names


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
