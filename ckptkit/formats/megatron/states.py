"""Name the numbered states of an optimizer, where it is certain which parameter each is of.

Source: megatron/core/optimizer/__init__.py: groups hold parameters in the model's order, in one group those with weight
decay, in another biases and whatever has one axis; optimizer.py: masters of 16-bit parameters lie beside the states.
The file does not say which number is which parameter. So numbers and shapes must all be as this says; or nothing is
named, and the states are carried as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.formats.archives.flatten import pairs_of
from ckptkit.formats.megatron.saved import OPTIMIZER, SavedRank
from ckptkit.layout import Blob, Spec, StoredTensor

MASTER = "fp32_param"
_MASTERS = "fp32_from_fp16_params"
_BUFFERS = ("inv_freq", "expert_bias", "local_tokens_per_expert")
_NARROW = ("float16", "bfloat16")

Parameter = tuple[int, str, Spec]  # of which run of layers, its name there, and what it is


@dataclass(frozen=True)
class Named:
    """The optimizer of one rank by the names of its parameters, each with the run of layers that it is in.

    `groups` are the parameters of each group, `settings` its other entries, `others` what lies beside all groups.
    """

    tensors: dict[str, dict[int, dict[str, StoredTensor]]] = field(default_factory=dict)
    blobs: dict[tuple[int, str, str], Blob] = field(default_factory=dict)
    groups: list[list[Parameter]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


class Uncertain(Exception):
    """A sign that numbers and shapes are not those of the model's parameters in their order."""


def name_states(saved: SavedRank) -> Named | None:
    """Return the optimizer in a rank's file by the names of parameters; None where these are not certain."""
    try:
        return read_states(saved)
    except Uncertain:
        return None


def read_states(saved: SavedRank) -> Named:
    """Return the optimizer by name. Raises `Uncertain`."""
    outer = as_dict(saved.entries.get(OPTIMIZER))
    inner = as_dict(outer[OPTIMIZER]) if OPTIMIZER in outer else outer
    states, groups = as_dict(inner.get("state")), [as_dict(group) for group in as_list(inner.get("param_groups"))]
    parameters = parameters_of(saved)
    named = Named()
    for group in groups:
        members = choose(group, parameters, is_alone=len(groups) == 1)
        numbers = as_list(group.get("params"))
        if len(numbers) != len(members):
            raise Uncertain
        for number, member in zip(numbers, members, strict=True):
            add_state(named, saved, member, as_dict(states.get(number, {})))
        named.groups.append(members)
        named.settings.append({key: value for key, value in group.items() if key != "params"})
    check_all_named(named, parameters, states)
    if outer is not inner:
        add_masters(named, saved, as_list(outer.get(_MASTERS, [])))
        named.others.update({key: value for key, value in outer.items() if key not in (OPTIMIZER, _MASTERS)})
    return named


def parameters_of(saved: SavedRank) -> list[Parameter]:
    """Return the parameters of a rank, run by run, in the model's order."""
    return [
        (run, name, spec)
        for run in saved.models
        for name, spec in saved.specs(run).items()
        if not name.endswith(_BUFFERS)
    ]


def choose(group: Mapping[str, Any], parameters: Sequence[Parameter], *, is_alone: bool) -> list[Parameter]:
    """Return the parameters that should be in a group, by whether it decays weights."""
    if group.get("is_expert_parallel") or group.get("is_decoupled_lr"):
        raise Uncertain
    if is_alone:
        return list(parameters)
    decay = group.get("wd_mult")
    if decay not in (0.0, 1.0):
        raise Uncertain
    return [one for one in parameters if (one[1].endswith(".bias") or len(one[2].shape) == 1) == (decay == 0.0)]


def add_state(named: Named, saved: SavedRank, member: Parameter, state: Mapping[str, Any]) -> None:
    """Add the state of one parameter, if its shape is that of the parameter."""
    run, name, spec = member
    flat = saved.flatten(dict(state))
    for moment, tensor in flat.tensors.items():
        if tensor.spec.shape not in ((), spec.shape) or moment not in state:
            raise Uncertain
        named.tensors.setdefault(moment, {}).setdefault(run, {})[name] = tensor
    for moment, blob in flat.blobs.items():
        named.blobs[run, name, moment] = blob


def check_all_named(named: Named, parameters: Sequence[Parameter], states: Mapping[Any, Any]) -> None:
    """Raise `Uncertain` unless each parameter is in one group, and there are no more states than parameters."""
    members = [member for group in named.groups for member in group]
    if sorted(members) != sorted(parameters) or len(states) > len(parameters):
        raise Uncertain


def add_masters(named: Named, saved: SavedRank, masters: Sequence[Any]) -> None:
    """Add the masters of parameters in 16 bits, which lie by group."""
    if masters and len(masters) != len(named.groups):
        raise Uncertain
    for members, values in zip(named.groups, masters, strict=False):
        narrow = [member for member in members if member[2].dtype.name in _NARROW]
        if len(as_list(values)) != len(narrow):
            raise Uncertain
        for member, value in zip(narrow, as_list(values), strict=True):
            add_state(named, saved, member, {MASTER: value})


def as_dict(value: Any) -> dict[Any, Any]:
    """Return a pickled dict of any kind as one. Raises `Uncertain` for anything else."""
    pairs = pairs_of(value)
    if pairs is None:
        raise Uncertain
    return dict(pairs)


def as_list(value: Any) -> list[Any]:
    """Return a list as it is. Raises `Uncertain` for anything else."""
    if not isinstance(value, list):
        raise Uncertain
    return value
