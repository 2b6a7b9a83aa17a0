"""Rules for the states of optimizers: shapes, names, groups, and what the weights beside them are.

States may have other shapes than their parameters on purpose: factors of a second moment (Adafactor), packed numbers
with scales (8-bit Adam), preconditioners (Shampoo, SOAP), projections of low rank (GaLore, APOLLO), one number for each
row or layer (Adam-mini, NovoGrad). A rule judges only states that are known to have an element for each one of the
parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from math import prod

from ckptkit.checkpoints.examination.facts import Facts, unwrap
from ckptkit.checkpoints.examination.inconsistency import Inconsistency
from ckptkit.layout import KeyPath, Layout
from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import WRAPPERS, WrapperPrefix
from ckptkit.models.names.group_map import GROUP_MAP

# states with an element for each of the parameter's. Sources: torch/optim, facebookresearch/schedule_free,
# NVIDIA/apex and NVIDIA/TransformerEngine
_ELEMENTWISE = frozenset(
    [
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_slow", "exp_avg_diff", "exp_avg_res"),
        *("momentum_buffer", "square_avg", "acc_delta", "grad_avg", "z"),
        *("master_param", "fp32_param", "prev_grad", "previous_grad", "neg_pre_grad"),
    ]
)
_SECOND = frozenset(["exp_avg_sq", "max_exp_avg_sq", "square_avg"])  # some optimizers have one for each row or slice
_LOW_RANK = frozenset(["rank", "update_proj_gap", "proj_type", "projection_type", "proj", "subspace_update_interval"])
_MARKS = ("projector", "ortho_matrix", "absmax", "qmap")  # states beside those that are projected or packed
_FLOATS = ("float", "small_float")


def find_state_shapes(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the elementwise states that do not have the shape of their parameter.

    Where only an index tells the parameter, a shape that no parameter has is likely wrong, unless few others fit.
    """
    every = {facts.layout.tensors[name].spec.shape for name in facts.weights}
    for above, states in facts.states.items():
        if facts.has_setting(above, _LOW_RANK):
            continue
        names = facts.names_of_indices(above)
        fitting, odd = 0, []
        for index, entries in states.items():
            name = names.get(index, index)
            shapes = facts.shapes_by_name.get(facts.plain_names.get(unwrap(name), name), set())
            is_index = not shapes and index.isdecimal()
            wrong = misshaped(facts, entries, every if is_index else shapes) if shapes or is_index else {}
            fitting += is_index and not wrong
            if is_index and wrong:
                odd.append(wrong)
            for found, kinds in wrong.items() if shapes else ():
                data = {"expected": list(min(shapes)), "found": list(found)}
                yield Inconsistency("state_shape", kinds[0], data, kinds)
        for found, kinds in (pair for wrong in odd if len(odd) <= fitting for pair in wrong.items()):
            yield Inconsistency("state_size", kinds[0], {"found": list(found), "others": fitting}, kinds)


def misshaped(facts: Facts, entries: Mapping[str, str], shapes: Collection[Shape]) -> dict[Shape, tuple[str, ...]]:
    """Return the elementwise states of a parameter that fit none of some shapes, by their own shape.

    `entries` are its states by kind.
    """
    specs = {kind: facts.layout.tensors[name].spec for kind, name in entries.items()}
    if any(word in kind for word in _MARKS for kind in specs):
        return {}
    found: dict[Shape, tuple[str, ...]] = {}
    first = {spec.shape for kind, spec in specs.items() if kind in _ELEMENTWISE - _SECOND}
    for kind in _ELEMENTWISE & specs.keys():
        spec = specs[kind]
        is_reduced = kind in _SECOND and spec.shape not in first
        fits = any(may_be_of(spec.shape, shape, is_reduced=is_reduced) for shape in shapes)
        if spec.dtype.kind in _FLOATS and spec.numel != 1 and not fits:
            found[spec.shape] = (*found.get(spec.shape, ()), entries[kind])
    return {shape: tuple(sorted(kinds)) for shape, kinds in found.items()}


def may_be_of(found: Shape, shape: Shape, *, is_reduced: bool = False) -> bool:
    """Return whether a state of one shape may be a parameter's of another: equal, or flattened.

    One that `is_reduced` may have a number for each row, or for any other slice.
    """
    if found == shape or (len(found) == 1 and found[0] == prod(shape)):
        return True
    return is_reduced and len(found) == len(shape) and all(a in (1, b) for a, b in zip(found, shape, strict=True))


def find_wrapped_states(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the optimizers whose parameters have a wrapper's prefix in their names where the weights have none.

    Or the other way round.
    """
    found: dict[tuple[str, WrapperPrefix, KeyPath], list[str]] = defaultdict(list)
    for above, states in facts.states.items():
        if has_group_map(facts.layout, above):
            continue  # its trainer finds the states under their wrapped names
        for name, entries in states.items():
            there = None if name in facts.shapes_by_name else facts.plain_names.get(unwrap(name))
            if there is None or name.isdecimal():
                continue
            code, text = ("wrapped_state", name) if unwrap(name) != name else ("wrapped_weight", there)
            wrapper = next(one for one in reversed(WRAPPERS) if one.text in text)
            found[code, wrapper, above] += entries.values()
    for (code, wrapper, _), names in found.items():
        yield Inconsistency(code, names[0], {"prefix": wrapper.text, "whose": wrapper.whose}, tuple(names))


def has_group_map(layout: Layout, above: KeyPath) -> bool:
    """Return whether an optimizer has a map from parameters to groups in the place of lists."""
    key = (*above, GROUP_MAP)
    return any(layout.key(name)[: len(key)] == key for name in layout.blobs)


def find_empty_groups(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the groups without parameters of optimizers that name their parameters.

    Source: `_split_optim_state_dict` in torch/distributed/checkpoint/state_dict.py, which finds a group by the names in
    it. Groups of indices are found by their position.
    """
    for optimizer in facts.optimizers:
        if optimizer.is_named and any(optimizer.groups):
            for number, group in enumerate(optimizer.groups):
                if not group:
                    yield Inconsistency("empty_group", optimizer.name, {"number": number})


def find_training_point(facts: Facts) -> Iterator[Inconsistency]:
    """Yield that a schedule-free optimizer was saved in training mode.

    Source: `train` and `eval` in schedulefree/adamw_schedulefree.py.
    """
    for above, states in facts.states.items():
        has_average = any("z" in entries for entries in states.values())
        if has_average and any(value is True for value in facts.settings(above, "train_mode")):
            yield Inconsistency("training_point", ".".join(map(str, above)) or None)
