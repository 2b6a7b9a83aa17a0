"""Translate tensors of a family to the Hub's names, or back, by a table of rules. No bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import NamedTuple, Self

from ckptkit.errors import CkptError, Mismatch
from ckptkit.layout import StoredTensor, axes
from ckptkit.models.names.outline import Numbers, outline_of
from ckptkit.models.names.rule import Pattern, Rule, patterns_of
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import FlatFront

_MAX_STACKED = 1 << 20  # layers times experts; ten times more than any model has

Found = dict[int, tuple[str, StoredTensor]]  # the name and tensor that a rule combines, by position in the rule


@dataclass(frozen=True, slots=True)
class Translated:
    """Tensors under their new names, the old names that each `came_from`, and the old names that no rule translates."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    came_from: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> Self:
        """Return tensors under the names that they have."""
        return cls(dict(tensors), {name: (name,) for name in tensors})

    def renamed(self, new_name: Callable[[str], str]) -> Self:
        """Return the tensors with `new_name` applied to their new names."""
        tensors = {new_name(name): tensor for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, came_from={new_name(name): old for name, old in self.came_from.items()})


Turn = Callable[[Mapping[str, StoredTensor]], Translated]


class Slot(NamedTuple):
    """The position of a tensor in a rule, the name pattern that matched, and all placeholders of the rule."""

    rule: Rule
    place: int
    pattern: Pattern
    captures: tuple[str, ...]


class Direction(NamedTuple):
    """The direction of a translation: to the Hub, or from it."""

    to_hub: bool

    def sources(self, rule: Rule) -> tuple[str, ...]:
        """Return the names that are read."""
        return rule.family if self.to_hub else rule.hub

    def targets(self, rule: Rule) -> tuple[Pattern, ...]:
        """Return the patterns of the names that are written."""
        return tuple(next(patterns_of(text)) for text in (rule.hub if self.to_hub else rule.family))

    def take(self, rule: Rule, tensors: tuple[StoredTensor, ...], sizes: Sizes) -> tuple[StoredTensor, ...]:
        return (rule.step.to_hub if self.to_hub else rule.step.from_hub)(tensors, sizes)


def translate(
    tensors: Mapping[str, StoredTensor], rules: Iterable[Rule], sizes: Sizes, *, to_hub: bool = True
) -> Translated:
    """Return the tensors as the other side of a table has them.

    Raises `Mismatch` for a tensor whose shape does not fit its step, and for one that its rule combines with missing
    ones.
    """
    side = Direction(to_hub)
    slots = find_slots(rules, side)
    groups: dict[Rule, dict[Numbers, Found]] = {}
    unplaced = []
    for name, tensor in tensors.items():
        outline, numbers = outline_of(name)
        slot = slots.get(outline)
        if slot is None:
            unplaced.append(name)
            continue
        members = groups.setdefault(slot.rule, {})
        for full, one in unfold(slot, numbers, tensor, sizes):
            by_place = members.setdefault(full, {})
            if slot.place in by_place:
                raise Mismatch(
                    f"the tensor is the same as `{by_place[slot.place][0]}`: two names of one tensor", tensor=name
                )
            by_place[slot.place] = name, one
    translated = Translated(unplaced=tuple(unplaced))
    for rule, members in groups.items():
        fold_rule(rule, members, sizes, side, translated)
    return translated


def find_slots(rules: Iterable[Rule], side: Direction) -> dict[str, Slot]:
    """Return the slot for each outline of a name that rules know. The first matching rule wins."""
    slots: dict[str, Slot] = {}
    for rule in rules:
        captures = captures_of(rule, side)
        for place, text in enumerate(side.sources(rule)):
            for pattern in patterns_of(text):
                slots.setdefault(pattern.outline, Slot(rule, place, pattern, captures))
    return slots


def captures_of(rule: Rule, side: Direction) -> tuple[str, ...]:
    """Return all placeholders of a rule: those of the written names first."""
    read = [capture for text in side.sources(rule) for pattern in patterns_of(text) for capture in pattern.captures]
    return tuple(dict.fromkeys([*side.targets(rule)[0].captures, *read]))


def unfold(slot: Slot, numbers: Numbers, tensor: StoredTensor, sizes: Sizes) -> Iterable[tuple[Numbers, StoredTensor]]:
    """Yield the tensors that are stacked in the first axes of a tensor, each with the numbers of all placeholders."""
    folded = [capture for capture in slot.captures if capture not in slot.pattern.captures]
    if folded and slot.rule.flat:
        (tensor,) = FlatFront(slot.rule.flat).to_hub((tensor,), sizes)
    if len(folded) > len(tensor.spec.shape):
        shape = list(tensor.spec.shape)
        raise Mismatch(
            f"expected an axis for each {' and each '.join(folded)}, found shape {shape}", tensor=slot.pattern.text
        )
    if (
        prod(tensor.spec.shape[: len(folded)]) > _MAX_STACKED
        or max(tensor.spec.shape[: len(folded)], default=0) > _MAX_STACKED
    ):
        message = (
            f"found shape {list(tensor.spec.shape)}: no known model has an axis of so many {' and '.join(folded)}s"
        )
        raise Mismatch(message, tensor=slot.pattern.text)
    own = dict(zip(slot.pattern.captures, numbers, strict=True))
    for indices, one in index_front_axes(tensor, len(folded)):
        numbered = own | dict(zip(folded, indices, strict=True))
        yield tuple(numbered[capture] for capture in slot.captures), one


def index_front_axes(tensor: StoredTensor, count: int) -> list[tuple[Numbers, StoredTensor]]:
    """Return the tensor at each index of the first `count` axes, without these axes."""
    indexed: list[tuple[Numbers, StoredTensor]] = [((), tensor)]
    for _ in range(count):
        indexed = [((*at, i), inner) for at, one in indexed for i, inner in enumerate(axes.unstack(one))]
    return indexed


def fold_rule(
    rule: Rule, members: Mapping[Numbers, Found], sizes: Sizes, side: Direction, translated: Translated
) -> None:
    """Add to `translated` the tensors that a rule makes of its members."""
    captures, targets = captures_of(rule, side), side.targets(rule)
    folded = [i for i, capture in enumerate(captures) if capture not in targets[0].captures]
    kept = [i for i in range(len(captures)) if i not in folded]
    converted: dict[Numbers, dict[Numbers, tuple[StoredTensor, ...]]] = {}
    origin: dict[Numbers, dict[str, None]] = {}
    for numbers, by_place in members.items():
        names, tensors = require_all(rule, by_place, numbers, captures, side)
        at = tuple(numbers[i] for i in kept)
        converted.setdefault(at, {})[tuple(numbers[i] for i in folded)] = step(rule, names, tensors, sizes, side)
        origin.setdefault(at, {}).update(dict.fromkeys(names))
    for at, parts in converted.items():
        for place, target in enumerate(targets):
            name = target.name(at)
            if name in translated.tensors:
                clash = f"`{translated.came_from[name][0]}` and `{next(iter(origin[at]))}` would both get this name"
                raise Mismatch(clash, tensor=name)
            by_index = {index: tensors[place] for index, tensors in parts.items()}
            stacked = stack_all(by_index, [captures[i] for i in folded], name)
            translated.tensors[name] = axes.merge(stacked, 0, 2) if folded and rule.flat else stacked
            translated.came_from[name] = tuple(origin[at])


def require_all(
    rule: Rule, by_position: Found, numbers: Numbers, captures: Sequence[str], side: Direction
) -> tuple[tuple[str, ...], tuple[StoredTensor, ...]]:
    """Return the names and tensors that a rule combines. Raises `Mismatch` if one is missing."""
    for place, text in enumerate(side.sources(rule)):
        if place not in by_position:
            present_name, _ = next(iter(by_position.values()))
            pattern = next(patterns_of(text))
            numbered = dict(zip(captures, numbers, strict=True))
            name = pattern.name(tuple(numbered[capture] for capture in pattern.captures))
            raise Mismatch(f"missing: `{present_name}` is here and needs this tensor too", tensor=name)
    pairs = [by_position[place] for place in sorted(by_position)]
    return tuple(name for name, _ in pairs), tuple(tensor for _, tensor in pairs)


def step(
    rule: Rule, names: Sequence[str], tensors: tuple[StoredTensor, ...], sizes: Sizes, side: Direction
) -> tuple[StoredTensor, ...]:
    """Apply the step of a rule. Adds the tensor's name to errors."""
    try:
        return side.take(rule, tensors, sizes)
    except IndexError:  # a step needs an axis that the tensor does not have
        shapes = " and ".join(str(list(tensor.spec.shape)) for tensor in tensors)
        raise Mismatch(f"found shape {shapes}: an axis that the rule needs is missing", tensor=names[0]) from None
    except CkptError as error:
        raise error.blame(tensor=names[0]) from None


def stack_all(parts: Mapping[Numbers, StoredTensor], counted: Sequence[str], name: str) -> StoredTensor:
    """Return tensors stacked along new axes in front, one axis for each of `counted`. Raises `Mismatch` for a gap."""
    if not counted:
        return parts[()]
    extents = [len({at[axis] for at in parts}) for axis in range(len(counted))]
    missing = next((at for at in product(*map(range, extents)) if at not in parts), None)
    if missing is not None:
        which = " of ".join(f"{what} {i}" for what, i in zip(reversed(counted), reversed(missing), strict=True))
        raise Mismatch(f"{which} is missing: found {len(parts)}, with a gap", tensor=name)
    stacked = dict(parts)
    for axis in reversed(range(len(counted))):
        fronts = dict.fromkeys(at[:axis] for at in stacked)
        stacked = {front: axes.stack([stacked[(*front, i)] for i in range(extents[axis])]) for front in fronts}
    return stacked[()]
