"""Tell counters, such as the step of an optimizer, from parameters and the states that are as large as these."""

from __future__ import annotations

from collections import Counter

from ckptkit.layout import KeyPath, Layout, Spec
from ckptkit.models.names.parameters import way_in_optimizer
from ckptkit.state.matching import find_model

_STATE, _STEP = "state", "step"


def find_counters(layout: Layout) -> set[str]:
    """Return the names of the tensors that are neither parameters nor optimizer states of the same size.

    These are steps of optimizers, single numbers beside a model, such as a learning rate, single integers in a model,
    and integers beside it, such as the states of random generators.
    """
    largest: Counter[KeyPath] = Counter()  # numbers in one tensor, by the state of a parameter
    for name, tensor in layout.tensors.items():
        key = layout.key(name)
        if not is_step(key):
            largest[state_in(key)] = max(largest[state_in(key)], tensor.spec.numel)
    model = find_model(layout)
    own = set(model.came_from.values() if model else layout.tensors)
    return {name for name, spec in layout.specs.items() if is_counter(layout.key(name), spec, largest, name in own)}


def is_counter(key: KeyPath, spec: Spec, largest: Counter[KeyPath], is_own: bool) -> bool:
    """Return whether a tensor is a counter; `largest` has the size of the largest tensor of each state."""
    if state_in(key):
        return is_step(key) or spec.numel == 1 < largest[state_in(key)]
    is_integer = spec.dtype.kind in ("int", "bool")
    return (is_integer or not is_own) if spec.numel == 1 else (is_integer and not is_own)


def state_in(key: KeyPath) -> KeyPath:
    """Return the way to the state of a parameter that an entry lies in; () for an entry of no state."""
    way = way_in_optimizer(key)
    return (*key[:-1], way[1]) if way is not None and way[0] == _STATE else ()


def is_step(key: KeyPath) -> bool:
    way = way_in_optimizer(key)
    return way is not None and way[2] == _STEP
