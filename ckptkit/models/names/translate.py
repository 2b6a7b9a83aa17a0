"""Translate tensors of a family to the Hub's names, or back, by a table of rules. No bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple, Self

from ckptkit.errors import CkptError, Mismatch
from ckptkit.layout import StoredTensor, axes
from ckptkit.layout.renames import Numbers, mask_numbers, numbers_in
from ckptkit.models.names.rule import Pattern, Rule, alternative_patterns
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import FlatFront, Tensors

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


Turn = Callable[[Mapping[str, StoredTensor]], Translated]


class DirectedRule(NamedTuple):
    """A rule in one direction: the names that are read, the patterns of the names that are written, and the step.

    `captures` are all placeholders: those of the written names first. For `flat` see `Rule`.
    """

    sources: tuple[str, ...]
    targets: tuple[Pattern, ...]
    captures: tuple[str, ...]
    step: Callable[[Tensors, Sizes], Tensors]
    flat: str

    @classmethod
    def of(cls, rule: Rule, *, to_hub: bool) -> Self:
        sources, written = (rule.family, rule.hub) if to_hub else (rule.hub, rule.family)
        targets = tuple(next(alternative_patterns(text)) for text in written)
        read = [capture for text in sources for pattern in alternative_patterns(text) for capture in pattern.captures]
        captures = tuple(dict.fromkeys([*targets[0].captures, *read]))
        return cls(sources, targets, captures, rule.step.to_hub if to_hub else rule.step.from_hub, rule.flat)


class Slot(NamedTuple):
    """The position of a tensor in a rule, and the name pattern that matched."""

    rule: DirectedRule
    place: int
    pattern: Pattern


def translate_by_rules(
    tensors: Mapping[str, StoredTensor], rules: Iterable[Rule], sizes: Sizes, *, to_hub: bool = True
) -> Translated:
    """Return the tensors as the other side of a table has them. The first rule that matches a name wins.

    Raises `Mismatch` for a tensor whose shape does not fit its step, and for one that its rule combines with missing
    ones.
    """
    slots: dict[str, Slot] = {}
    for rule in (DirectedRule.of(rule, to_hub=to_hub) for rule in rules):
        for place, text in enumerate(rule.sources):
            for pattern in alternative_patterns(text):
                slots.setdefault(pattern.outline, Slot(rule, place, pattern))
    groups: dict[DirectedRule, dict[Numbers, Found]] = {}
    unplaced = []
    for name, tensor in tensors.items():
        slot = slots.get(mask_numbers(name))
        if slot is None:
            unplaced.append(name)
            continue
        members = groups.setdefault(slot.rule, {})
        for full, one in unstack_front_axes(slot, numbers_in(name), tensor, sizes):
            by_place = members.setdefault(full, {})
            if slot.place in by_place:
                message = f"the tensor is the same as `{by_place[slot.place][0]}`: two names of one tensor"
                raise Mismatch(message, tensor=name)
            by_place[slot.place] = name, one
    translated = Translated(unplaced=tuple(unplaced))
    for rule, members in groups.items():
        apply_rule_to_members(rule, members, sizes, translated)
    return translated


def unstack_front_axes(
    slot: Slot, numbers: Numbers, tensor: StoredTensor, sizes: Sizes
) -> Iterable[tuple[Numbers, StoredTensor]]:
    """Yield the tensors that are stacked in the first axes of a tensor, each with the numbers of all placeholders."""
    folded = [capture for capture in slot.rule.captures if capture not in slot.pattern.captures]
    if folded and slot.rule.flat:
        (tensor,) = FlatFront(slot.rule.flat).to_hub((tensor,), sizes)
    shape = list(tensor.spec.shape)
    if len(folded) > len(shape):
        message = f"expected an axis for each {' and each '.join(folded)}, found shape {shape}"
        raise Mismatch(message, tensor=slot.pattern.text)
    stacked = shape[: len(folded)]
    if max([prod(stacked), *stacked]) > _MAX_STACKED:  # an extent of 0 makes the product 0
        message = f"found shape {shape}: no known model has an axis of so many {' and '.join(folded)}s"
        raise Mismatch(message, tensor=slot.pattern.text)
    own = dict(zip(slot.pattern.captures, numbers, strict=True))
    indexed: list[tuple[Numbers, StoredTensor]] = [((), tensor)]
    for _ in folded:
        indexed = [((*at, i), inner) for at, one in indexed for i, inner in enumerate(axes.unstack(one))]
    for indices, one in indexed:
        numbered = own | dict(zip(folded, indices, strict=True))
        yield tuple(numbered[capture] for capture in slot.rule.captures), one


def apply_rule_to_members(
    rule: DirectedRule, members: Mapping[Numbers, Found], sizes: Sizes, translated: Translated
) -> None:
    """Add to `translated` the tensors that a rule makes of its members."""
    folded = [i for i, capture in enumerate(rule.captures) if capture not in rule.targets[0].captures]
    kept = [i for i in range(len(rule.captures)) if i not in folded]
    converted: dict[Numbers, dict[Numbers, Tensors]] = {}
    origin: dict[Numbers, dict[str, None]] = {}
    for numbers, by_place in members.items():
        at = tuple(numbers[i] for i in kept)
        names, made = combine(rule, by_place, numbers, sizes)
        converted.setdefault(at, {})[tuple(numbers[i] for i in folded)] = made
        origin.setdefault(at, {}).update(dict.fromkeys(names))
    for at, parts in converted.items():
        for place, target in enumerate(rule.targets):
            name = target.format_name(at)
            if name in translated.tensors:
                clash = f"`{translated.came_from[name][0]}` and `{next(iter(origin[at]))}` would both get this name"
                raise Mismatch(clash, tensor=name)
            by_index = {index: tensors[place] for index, tensors in parts.items()}
            stacked = stack_in_front(by_index, [rule.captures[i] for i in folded], name)
            translated.tensors[name] = axes.merge_axes(stacked, 0, 2) if folded and rule.flat else stacked
            translated.came_from[name] = tuple(origin[at])


def combine(rule: DirectedRule, by_place: Found, numbers: Numbers, sizes: Sizes) -> tuple[list[str], Tensors]:
    """Return the names that a rule combines, and the tensors that its step makes. Raises `Mismatch` if one is missing.

    Adds the name of the first tensor to errors of the step.
    """
    names = [by_place[place][0] for place in sorted(by_place)]
    for place, text in enumerate(rule.sources):
        if place not in by_place:
            pattern = next(alternative_patterns(text))
            numbered = dict(zip(rule.captures, numbers, strict=True))
            missing = pattern.format_name(tuple(numbered[capture] for capture in pattern.captures))
            present, _ = next(iter(by_place.values()))
            raise Mismatch(f"missing: `{present}` is here and needs this tensor too", tensor=missing)
    tensors = tuple(by_place[place][1] for place in sorted(by_place))
    try:
        return names, rule.step(tensors, sizes)
    except IndexError:  # a step needs an axis that the tensor does not have
        shapes = " and ".join(str(list(tensor.spec.shape)) for tensor in tensors)
        raise Mismatch(
            f"expected more axes, to convert the tensor to other names; found shape {shapes}", tensor=names[0]
        ) from None
    except CkptError as error:
        raise error.blame(tensor=names[0]) from None


def stack_in_front(
    tensor_by_numbers: Mapping[Numbers, StoredTensor], counted: Sequence[str], name: str
) -> StoredTensor:
    """Return tensors stacked along new axes in front, one axis for each of `counted`. Raises `Mismatch` for a gap."""
    if not counted:
        return tensor_by_numbers[()]
    extents = [len({at[axis] for at in tensor_by_numbers}) for axis in range(len(counted))]
    missing = next((at for at in product(*map(range, extents)) if at not in tensor_by_numbers), None)
    if missing is not None:
        which = " of ".join(f"{what} {i}" for what, i in zip(reversed(counted), reversed(missing), strict=True))
        raise Mismatch(f"{which} is missing: found {len(tensor_by_numbers)}, with a gap", tensor=name)
    stacked = dict(tensor_by_numbers)
    for axis in reversed(range(len(counted))):
        fronts = dict.fromkeys(at[:axis] for at in stacked)
        stacked = {front: axes.stack_tensors([stacked[(*front, i)] for i in range(extents[axis])]) for front in fronts}
    return stacked[()]
