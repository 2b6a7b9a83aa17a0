"""Match the parameter indices of an optimizer with the model's parameters, by sizes alone or by order and sizes.

torch's optimizers number their parameters, group by group, in the order in which the training script passed them.
`match_by_size` assumes no order: it needs a different size for every parameter, and an index for every parameter of a
model. If the optimizer has fewer indices, it may train something that was not saved.

`match_in_order` assumes that every group lists its parameters in the order of the model's `parameters()`. Sizes cannot
prove that order, so call it only where the trainer's code fixes the order, or the user confirms it. There must be
exactly one way to distribute the parameters to the groups so that all sizes fit: two groups of equal layers have
several ways, and match nothing.

A size is a shape, or a number of elements where states are flattened. Parameters have any key, such as their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout.box import Shape
from ckptkit.words import count

P = ParamSpec("P")
Key = TypeVar("Key", bound=Hashable)
Size = Shape | int
Groups = Sequence[Sequence[int]]  # the parameter indices in each group
MayHold = Callable[[int, Any], bool]  # (index of a group, key of a parameter) -> whether the group may list it

_MOST_WAYS = 32  # assignments that are followed at the same time
_MOST_STEPS = 1 << 22  # groups times parameters
KEEP_NUMBERS = "pass --optimizer-keys ids to keep the numbers"
_HINT = "check that the optimizer belongs to this model"


def match_in_order(
    groups: Groups, sizes: Mapping[int, Size], parameters: Mapping[Key, Size], may_hold: MayHold | None = None
) -> dict[int, Key]:
    """Return the parameter of each index.

    `sizes` are those of the states, by index, where a state shows the size of its parameter. `parameters` has the
    model's parameters in order. Raises `Corrupt` for an index that the groups list twice or not at all, `Unsupported`
    if no assignment fits, or several do.
    """
    check_indices(groups, sizes)
    total = sum(map(len, groups))
    if total != len(parameters):
        message = f"expected {count(len(parameters), 'parameter')} as in the model, found {total} in the optimizer"
        raise Unsupported(message, hint=_HINT)
    if len(groups) * total > _MOST_STEPS:
        raise Unsupported(f"{count(len(groups), 'group')} of parameters: their shapes alone do not tell them apart")
    numbers = assign_uniquely(groups, sizes, parameters, may_hold or (lambda _index, _key: True))
    return dict(zip(numbers, parameters, strict=True))


def match_or_none(match: Callable[P, dict[int, Key]], *args: P.args, **kwargs: P.kwargs) -> dict[int, Key] | None:
    """Return the result of `match_in_order` or `match_by_size` for these arguments; None where it is not certain."""
    try:
        return match(*args, **kwargs)
    except (Corrupt, Unsupported):
        return None


def match_by_size(groups: Groups, sizes: Mapping[int, Size], *models: Mapping[Key, Size]) -> dict[int, Key]:
    """Return the parameter of each index if sizes allow exactly one assignment, in any order, to all of one model.

    `sizes` are as for `match_in_order`; each of `models` has the parameters of a model, without those known to be
    frozen. Raises `Corrupt` for an index that the groups list twice or not at all, `Unsupported` if no assignment fits,
    or several do, or if the indices are not all parameters of one of the models.
    """
    check_indices(groups, sizes)
    numbers = list(chain.from_iterable(groups))
    parameters = {key: size for model in models for key, size in model.items()}
    of_size: dict[Size, list[Key]] = {}
    for key, size in parameters.items():
        of_size.setdefault(size, []).append(key)
    assigned: dict[int, Key] = {}
    for size, states in Counter(sizes[number] for number in numbers if number in sizes).items():
        keys = of_size.get(size, [])
        if len(keys) < states:
            expected = f"expected at most {len(keys)} states of shape {format_shape_or_numel(size)} as in the model"
            raise Unsupported(f"{expected}, found {states}", hint=_HINT)
        if len(keys) > 1:
            both = f"this parameter and `{keys[1]!s}` have the same shape {format_shape_or_numel(size)}"
            raise Unsupported(f"{both}, and no file says which state belongs to which", tensor=str(keys[0]))
        assigned[next(number for number in numbers if sizes.get(number) == size)] = keys[0]
    unknown = [number for number in numbers if number not in sizes]
    unassigned = [key for key in parameters if key not in assigned.values()]
    if len(unknown) > 1 or len(unassigned) < len(unknown):
        raise Unsupported(f"{count(len(unknown), 'parameter')}: no state of the optimizer shows a shape for them")
    if unknown and len(unassigned) > 1:
        message = f"a state without a shape belongs to this parameter or to `{unassigned[1]!s}`, and no file says which"
        raise Unsupported(message, tensor=str(unassigned[0]))
    assigned |= dict(zip(unknown, unassigned, strict=False))
    trained = set(assigned.values())
    if not any(are_all_parameters_trained(model, trained) for model in models):
        raise partial_optimizer_error(trained, models)
    return assigned


def are_all_parameters_trained(model: Mapping[Key, Size], trained: Collection[Key]) -> bool:
    """Return whether these are all parameters of a model. Others without dimensions may be buffers, such as a scale."""
    return model.keys() >= set(trained) and all(model[key] == () for key in model.keys() - set(trained))


def partial_optimizer_error(keys: set[Key], models: Sequence[Mapping[Key, Size]]) -> Unsupported:
    """Return the error for an optimizer whose shapes fit, but that has no index for some parameters of each model."""
    total = count(len(keys), "parameter")
    model = next((model for model in models if model.keys() >= keys), None)
    if model is None:
        return Unsupported(f"the {total} of the optimizer belong to several models")
    without = next(key for key in model if key not in keys)
    message = f"expected {len(model)} parameters as in the model, found {len(keys)}: `{without!s}` has no index. Frozen"
    return Unsupported(f"{message} parameters explain that, and so does an optimizer of something that was not saved")


def match_with_frozen_parameters(
    groups: Groups, sizes: Mapping[int, Size], parameters: Mapping[Key, Size]
) -> dict[int, Key]:
    """Return the parameter of each index, as `match_in_order`, for a model in which some `parameters` may be frozen."""
    check_indices(groups, sizes)
    numbers = list(chain.from_iterable(groups))
    if len(parameters) == len(numbers) or any(number not in sizes for number in numbers):
        return match_in_order(groups, sizes, parameters)
    wanted = Counter(sizes[number] for number in numbers)
    available = Counter(size for size in parameters.values() if size in wanted)
    for size, states in wanted.items():
        if available[size] != states:
            expected = f"expected {available[size]} states of shape {format_shape_or_numel(size)} as in the model"
            hint = f"{_HINT}, and whether a part was frozen"
            raise Unsupported(f"{expected}, found {count(states, 'state')} in the optimizer", hint=hint)
    return match_in_order(groups, sizes, {key: size for key, size in parameters.items() if size in wanted})


def is_counted_from_zero(groups: Groups) -> bool:
    """Return whether the indices are 0, 1, 2 and so on through all groups, as torch saves them."""
    return all(number == index for index, number in enumerate(chain.from_iterable(groups)))


def check_indices(groups: Groups, used: Collection[int] = ()) -> None:
    """Raise `Corrupt` for an index that the groups list twice, or that is `used` but in no group."""
    times = Counter(chain.from_iterable(groups))
    twice = [number for number, often in times.items() if often > 1]
    if twice:
        raise Corrupt(f"the optimizer's groups list parameter {min(twice)} twice")
    strays = set(used) - times.keys()
    if strays:
        raise Corrupt(f"the optimizer has a state for parameter {min(strays)}, but no group contains the parameter")


class Way(NamedTuple):
    """One way to distribute the first parameters: `before` without the last of them, and its index, `number`.

    Ways that give each group equally many parameters are merged into one. `ambiguous_at` is the last parameter at which
    a merge dropped another way.
    """

    before: Way | None
    number: int
    ambiguous_at: Any


def assign_uniquely(
    groups: Groups, sizes: Mapping[int, Size], parameters: Mapping[Key, Size], may_hold: MayHold
) -> list[int]:
    """Return the index of each parameter, in order. Raises `Unsupported` unless there is exactly one assignment."""
    # a key counts the parameters that each group got so far
    reached: dict[tuple[int, ...], Way | None] = {(0,) * len(groups): None}
    for key, size in parameters.items():
        next_reached: dict[tuple[int, ...], Way | None] = {}
        for counts, way in reached.items():
            for i, group in enumerate(groups):
                if counts[i] < len(group) and sizes.get(group[counts[i]], size) == size and may_hold(i, key):
                    after = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
                    ambiguous_at = key if after in next_reached else way and way.ambiguous_at
                    next_reached[after] = Way(way, group[counts[i]], ambiguous_at)
        if not next_reached:
            message = f"no optimizer state in this position has the shape {format_shape_or_numel(size)}"
            raise Unsupported(message, tensor=str(key), hint=_HINT)
        # so many open assignments stay ambiguous, and would take too long
        if len(next_reached) > _MOST_WAYS:
            raise ambiguous_group_error(key)
        reached = next_reached
    (way,) = reached.values()  # all parameters are assigned
    if way is not None and way.ambiguous_at is not None:
        raise ambiguous_group_error(way.ambiguous_at)
    numbers: list[int] = []
    while way is not None:
        numbers.append(way.number)
        way = way.before
    return numbers[::-1]


def ambiguous_group_error(key: Hashable) -> Unsupported:
    message = "the shape fits several optimizer groups, so the parameter index is unknown"
    return Unsupported(message, tensor=str(key), hint=KEEP_NUMBERS)


def format_shape_or_numel(size: Size) -> str:
    return str([size] if isinstance(size, int) else list(size))
