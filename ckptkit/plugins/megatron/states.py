"""Assign the states of an optimizer to parameters by name, if the assignment is certain.

Source: megatron/core/optimizer/__init__.py: parameter groups list parameters in the model's order, one group with
weight decay, another with biases and one-dimensional tensors; optimizer.py: the fp32 master weights of 16-bit
parameters are stored next to the states. The file does not record which index belongs to which parameter. If indices
and shapes do not match the model, nothing is named, and the states are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats.archives.flatten import FlatState, find_dict_items
from ckptkit.formats.archives.non_tensor_entries import find_parameter_indices_by_group
from ckptkit.layout import Blob, Spec, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.match_parameters import match_in_order, match_or_none
from ckptkit.layout.wrappers import PARAM_NAMES, parameters_by_index, read_recorded_names
from ckptkit.plugins.megatron.rank_files import OPTIMIZER, SavedRank

MASTER = "fp32_param"
_MASTERS = "fp32_from_fp16_params"
_BUFFERS = ("inv_freq", "expert_bias", "local_tokens_per_expert")
_NARROW = ("float16", "bfloat16")
_KIND = ("wd_mult", "lr_mult")

Parameter = tuple[int, str, Spec]  # run of layers, name in the run, dtype and shape


@dataclass(frozen=True)
class NamedOptimizer:
    """The optimizer of one rank by parameter name, per run of layers.

    `groups` are the parameters of each group, `settings` its other entries, `others` the entries outside all groups.
    """

    tensors: dict[str, dict[int, dict[str, StoredTensor]]] = field(default_factory=dict)
    blobs: dict[tuple[int, str, str], Blob] = field(default_factory=dict)
    groups: list[list[Parameter]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)

    def with_group_order_of(self, other: NamedOptimizer) -> NamedOptimizer | None:
        """Return the optimizer with its groups in the order of another rank; None if the groups differ.

        A rank orders its groups by the first parameter in each of them.
        """
        kinds, wanted = ([[group.get(key) for key in _KIND] for group in one.settings] for one in (self, other))
        if kinds == wanted:
            return self
        if len(kinds) != len(wanted) or any(kinds.count(kind) != 1 for kind in wanted):
            return None
        order = [kinds.index(kind) for kind in wanted]
        return replace(self, groups=[self.groups[i] for i in order], settings=[self.settings[i] for i in order])


class Uncertain(Exception):
    """Raised when indices and shapes do not match the model's parameters in order."""


def read_named_optimizer(saved: SavedRank) -> NamedOptimizer:
    """Return the optimizer in the file of a rank by parameter name. Raises `Uncertain` if the names are not certain."""
    outer = require_certain_dict(saved.entries.get(OPTIMIZER))
    inner = require_certain_dict(outer[OPTIMIZER]) if OPTIMIZER in outer else outer
    groups = [require_certain_dict(group) for group in require_certain_list(inner.get("param_groups"))]
    numbers = find_parameter_indices_by_group(inner)
    if numbers is None:
        raise Uncertain
    indices, states = list(chain.from_iterable(numbers)), require_certain_dict(inner.get("state"))
    if not states.keys() <= set(indices):
        raise Uncertain
    known = {number: require_certain_dict(states.get(number, {})) for number in indices}
    flats = {number: flatten_state(saved, state) for number, state in known.items() if state}
    parameter_of = match_by_shape_and_decay(saved, groups, numbers, flats)
    members = [[parameter_of[number] for number in group] for group in numbers]
    named = NamedOptimizer(
        groups=members, settings=[{k: v for k, v in group.items() if k != "params"} for group in groups]
    )
    for number, flat in flats.items():
        add_state(named, parameter_of[number], flat)
    named.others.update({key: value for key, value in inner.items() if key not in ("state", "param_groups")})
    if outer is not inner:
        add_masters(named, saved, require_certain_list(outer.get(_MASTERS, [])))
        named.others.update({key: value for key, value in outer.items() if key not in (OPTIMIZER, _MASTERS)})
    return named


def flatten_state(saved: SavedRank, state: dict[Any, Any]) -> FlatState:
    """Return the flattened state of one parameter. Raises `Uncertain` for nested tensors."""
    flat = saved.flatten(state)
    if not flat.tensors.keys() <= state.keys():
        raise Uncertain
    return flat


def match_by_shape_and_decay(
    saved: SavedRank,
    groups: Sequence[Mapping[str, Any]],
    indices_by_group: Sequence[Sequence[int]],
    flats: Mapping[int, FlatState],
) -> dict[int, Parameter]:
    """Return the parameter of each index, using shapes and weight decay. Raises `Uncertain`."""
    if any(group.get("is_expert_parallel") or group.get("is_decoupled_lr") for group in groups):
        raise Uncertain
    decays = [group.get("wd_mult") for group in groups]
    if len(groups) > 1 and any(decay not in (0.0, 1.0) for decay in decays):
        raise Uncertain

    def may_hold(index: int, parameter: Parameter) -> bool:
        _, name, spec = parameter
        is_without_decay = name.endswith(".bias") or len(spec.shape) == 1
        return len(groups) == 1 or is_without_decay == (decays[index] == 0.0)

    parameters = {
        (run, name, spec): spec.shape
        for run in saved.models_by_virtual_stage
        for name, spec in saved.specs(run).items()
        if not name.endswith(_BUFFERS)
    }
    shapes = {number: shape for number, flat in flats.items() if (shape := find_shape_of_state(flat)) is not None}
    if any(PARAM_NAMES in group for group in groups):
        return match_by_names_in_groups(groups, indices_by_group, shapes, parameters)
    matched = match_or_none(match_in_order, indices_by_group, shapes, parameters, may_hold)
    if matched is None:
        raise Uncertain
    return matched


def match_by_names_in_groups(
    groups: Sequence[Mapping[str, Any]],
    indices_by_group: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    parameters: Mapping[Parameter, Shape],
) -> dict[int, Parameter]:
    """Return the parameter of each index, using the names that the groups record. Raises `Uncertain`."""
    known = {name: (run, name, spec) for run, name, spec in parameters}
    try:
        recorded = read_recorded_names(indices_by_group, [group.get(PARAM_NAMES) for group in groups])
        matched = parameters_by_index(recorded, shapes, {name: spec.shape for name, (_, _, spec) in known.items()})
    except (Mismatch, Unsupported):
        raise Uncertain from None
    if len(known) < len(parameters):  # every run counts layers from 0, so names can repeat
        raise Uncertain
    return {number: known[name] for number, name in matched.items()}


def find_shape_of_state(flat: FlatState) -> Shape | None:
    """Return the shape of the tensors in a state; None if all are scalars. Raises `Uncertain` for several shapes."""
    shapes = {tensor.spec.shape for tensor in flat.tensors.values()} - {()}
    if len(shapes) > 1:
        raise Uncertain
    return shapes.pop() if shapes else None


def add_state(named: NamedOptimizer, member: Parameter, flat: FlatState) -> None:
    run, name, _ = member
    for moment, tensor in flat.tensors.items():
        named.tensors.setdefault(moment, {}).setdefault(run, {})[name] = tensor
    for moment, blob in flat.blobs.items():
        named.blobs[run, name, moment] = blob


def add_masters(named: NamedOptimizer, saved: SavedRank, masters: Sequence[Any]) -> None:
    """Add the fp32 master weights of 16-bit parameters, which are listed by group. Raises `Uncertain`."""
    if masters and len(masters) != len(named.groups):
        raise Uncertain
    for members, values in zip(named.groups, masters, strict=False):
        narrow = {member: member[2].shape for member in members if member[2].dtype.name in _NARROW}
        flats = dict(enumerate(flatten_state(saved, {MASTER: value}) for value in require_certain_list(values)))
        shapes = {number: shape for number, flat in flats.items() if (shape := find_shape_of_state(flat)) is not None}
        matched = match_or_none(match_in_order, [list(flats)], shapes, narrow)
        if matched is None:
            raise Uncertain
        for number, flat in flats.items():
            add_state(named, matched[number], flat)


def require_certain_dict(value: Any) -> dict[Any, Any]:
    """Return a pickled dict of any class as a dict. Raises `Uncertain` for anything else."""
    pairs = find_dict_items(value)
    if pairs is None:
        raise Uncertain
    return dict(pairs)


def require_certain_list(value: Any) -> list[Any]:
    """Return the value if it is a list. Raises `Uncertain` for anything else."""
    if not isinstance(value, list):
        raise Uncertain
    return value
