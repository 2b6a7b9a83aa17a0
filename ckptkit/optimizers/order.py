"""Give the numbers of an optimizer's parameters their names, by order and shapes. Arithmetic; opens no file.

torch's optimizers number their parameters, group by group. Which name a number means is certain if

- the model's file has every parameter that was trained,
- its order is that of the model's `parameters()`,
- each group lists its parameters in that order, as every group does that is a selection of `named_parameters()`,
- and there is just one way to deal the model's parameters out to the groups so that all shapes fit.

That covers one group for all, weights with decay before those without, and matrices before vectors, whatever decided
which is which. Where there is another way, as for two groups of equal layers, nothing is named: a guess would swap
two states in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.tensors.box import Shape

_MOST_GROUPS = 32  # more are a group for each layer or parameter, which shapes do not tell apart
_MOST_WAYS = 32  # that are followed at the same time
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")  # floats that are no parameters

Pointers = tuple[int, ...]  # how many of each group have been dealt out


def pair(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], parameters: Mapping[str, Shape]
) -> dict[int, str]:
    """Return the name of each number in the groups.

    `shapes` are those of the states, by number, where a state shows its parameter's; `parameters` those of the model's
    tensors, in the order of its `state_dict()`, each once. Raises `Corrupt` for a number that is listed twice or in no
    group, `Unsupported` where the names are not certain.
    """
    check_numbers(groups)
    strays = shapes.keys() - {number for group in groups for number in group}
    if strays:
        raise Corrupt(f"the optimizer has a state of parameter {min(strays)}, which is in none of its groups")
    count = sum(map(len, groups))
    trained = choose(parameters, groups, shapes)
    if len(trained) != count:
        message = f"the optimizer has {count} parameters, the model {len(trained)} that they could be"
        raise Unsupported(message, hint="is the optimizer that of another model?")
    if len(groups) > _MOST_GROUPS:
        raise Unsupported(f"{len(groups)} groups of parameters: shapes do not tell which is which")
    return deal(groups, shapes, trained)


def check_numbers(groups: Sequence[Sequence[int]]) -> None:
    """Raise `Corrupt` for a number that is listed twice."""
    times = Counter(number for group in groups for number in group)
    twice = [number for number, count in times.items() if count > 1]
    if twice:
        raise Corrupt(f"the groups of the optimizer list parameter {min(twice)} twice")


def choose(
    parameters: Mapping[str, Shape], groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape]
) -> dict[str, Shape]:
    """Return the tensors that the numbers can mean: all but known buffers, or those of the states' shapes.

    With a tensor more than states of some shape, one of them was not trained, and it cannot be told which.
    """
    floats = {name: shape for name, shape in parameters.items() if not name.endswith(BUFFERS)}
    numbers = [number for group in groups for number in group]
    if len(floats) == len(numbers) or any(number not in shapes for number in numbers):
        return floats
    wanted = Counter(shapes[number] for number in numbers)
    found = Counter(shape for shape in floats.values() if shape in wanted)
    for shape, count in wanted.items():
        if found[shape] != count:
            message = f"the optimizer has {count} states of shape {list(shape)}, the model {found[shape]} such tensors"
            raise Unsupported(message, hint="is the optimizer that of another model, or was a part of it frozen?")
    return {name: shape for name, shape in floats.items() if shape in wanted}


def deal(groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], trained: Mapping[str, Shape]) -> dict[int, str]:
    """Deal the parameters out to the groups, in order, in the one way that fits all shapes.

    Raises `Unsupported` if there is none, or another.
    """
    start: Pointers = (0,) * len(groups)
    ways: list[dict[Pointers, list[int]]] = []  # for each parameter, what has been dealt then, and by which group last
    reached: dict[Pointers, list[int]] = {start: []}
    for name, shape in trained.items():
        ahead: dict[Pointers, list[int]] = {}
        for dealt in reached:
            for i, group in enumerate(groups):
                if dealt[i] < len(group) and shapes.get(group[dealt[i]], shape) == shape:
                    ahead.setdefault((*dealt[:i], dealt[i] + 1, *dealt[i + 1 :]), []).append(i)
        if not ahead:
            message = f"no state of the optimizer has the shape {list(shape)} in its place"
            raise Unsupported(message, tensor=name, hint="is the optimizer that of another model?")
        if len(ahead) > _MOST_WAYS:
            raise ambiguous(name)
        ways.append(ahead)
        reached = ahead
    return trace_back(groups, list(trained), ways)


def trace_back(
    groups: Sequence[Sequence[int]], names: Sequence[str], ways: Sequence[Mapping[Pointers, Sequence[int]]]
) -> dict[int, str]:
    """Return the name of each number by the way that led to all of them. Raises `Unsupported` if two did."""
    dealt: Pointers = tuple(map(len, groups))
    found: dict[int, str] = {}
    for name, reached in zip(reversed(names), reversed(ways), strict=True):
        last, *others = reached[dealt]
        if others:
            raise ambiguous(name)
        found[groups[last][dealt[last] - 1]] = name
        dealt = (*dealt[:last], dealt[last] - 1, *dealt[last + 1 :])
    return found


def ambiguous(name: str) -> Unsupported:
    message = "shapes do not tell in which group of the optimizer it is, and so not which number it has"
    return Unsupported(message, tensor=name, hint="--optimizer-keys ids leaves the numbers as they are")
