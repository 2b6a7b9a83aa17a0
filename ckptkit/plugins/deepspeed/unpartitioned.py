"""Read the model and the optimizer of a run without ZeRO: one file contains both.

Source: `_save_checkpoint` in deepspeed/runtime/engine.py, `state_dict` in deepspeed/runtime/fp16/unfused_optimizer.py.
It is a torch optimizer with parameter indices; 16-bit runs add fp32 master weights, one list per group. The training
script passes the parameters to `deepspeed.initialize` in any order, so an index is only certain if names were recorded
or the shapes are unique.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import Corrupt, Mismatch, Unsupported, errors_at
from ckptkit.formats.archives.flatten import FlatState, Flattening
from ckptkit.formats.pickles.tensor_calls import as_tensor_record, is_pickled_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, KeyPath, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.match_parameters import is_counted_from_zero, match_by_size, match_in_order, match_or_none
from ckptkit.layout.wrappers import PARAM_NAMES, parameters_by_index, read_recorded_names
from ckptkit.plugins.deepspeed.auto_experts import LAYERS
from ckptkit.plugins.deepspeed.model_states import ModelStates
from ckptkit.plugins.deepspeed.values import (
    as_plain_values,
    dict_or_empty,
    require_count,
    require_dict,
    require_each,
    require_type,
)

Settings = Mapping[str | int, Any]

MODEL = "model"
STATE = ("optimizer", "state")
GROUPS = ("optimizer", "param_groups")
# dicts and lists that are kept as one entry
_IN_ONE = frozenset(["ds_config", "universal_checkpoint_info", LAYERS])


@dataclass(slots=True)
class Gathering:
    """The result under construction: tensors and entries by name, and low-precision twins by tensor name."""

    flat: FlatState = field(default_factory=FlatState)
    twins: dict[str, StoredTensor] = field(default_factory=dict)

    def put_entry(self, key: KeyPath, stored: StoredTensor | Blob) -> None:
        """Put a tensor or an entry at a key path. Raises `Unsupported` if the name is taken."""
        if (name := ".".join(map(str, key))) in self.flat.keys:
            raise Unsupported("two entries have the same name", tensor=name)
        self.flat.put(key, stored)

    def put_flattened(self, flattening: Flattening, value: Any, key: KeyPath) -> None:
        """Put all tensors and entries inside `value` below a key path."""
        flattening.flat = self.flat
        flattening.add_nested(value, key)

    def put_shared_state(self, flattening: Flattening, names: list[str], values: Mapping[str, Any]) -> None:
        """Put optimizer state that several parameters share below the name of each of them."""
        for state_name, value in values.items():
            with errors_at(tensor=".".join((*STATE, *names[:1], state_name))):
                stored = flattening.make_entry(value)
            for name in names:
                self.put_entry((*STATE, name, state_name), stored)

    def put_group(self, flattening: Flattening, number: int, settings: Settings, names: Sequence[str | int]) -> None:
        for key, value in settings.items():
            if key != "params":
                self.put_flattened(flattening, value, (*GROUPS, number, key))
        # not flattened: the names are in another file, and too long for the budget of this one
        self.put_entry((*GROUPS, number, "params"), Blob(flattening.path, flattening.pickle.offset, 0, dump(names)))

    def put_other_entry(self, flattening: Flattening, key: str | int, value: Any) -> None:
        """Put an entry under its own key, or under `client_state` if the model or the optimizer has that key."""
        key_path = ("client_state", key) if key in (MODEL, STATE[0]) else (key,)
        value = as_plain_values(value)
        if key in _IN_ONE:
            self.put_entry(key_path, flattening.make_blob(value))
        else:
            self.put_flattened(flattening, value, key_path)


_MASTERS = "fp32_groups"
_TORCH = "optimizer_state_dict"
Names = Mapping[int, str]  # parameter index to name


@dataclass(frozen=True, slots=True)
class IndexedOptimizer:
    """An optimizer with parameter indices: groups, states, fp32 master weights, and all other saved entries."""

    flattening: Flattening
    groups: Sequence[Mapping[str | int, Any]]
    states: Mapping[str | int, Any]
    masters: Sequence[Any]
    others: Mapping[str | int, Any]

    @property
    def indices_by_group(self) -> list[list[Any]]:
        return [require_type(group.get("params"), list, "params") for group in self.groups]


def read_indexed_optimizer(flattening: Flattening, value: Any) -> IndexedOptimizer:
    """Return the optimizer that was saved as `value`; None means an optimizer without states."""
    saved = dict_or_empty(value, "optimizer")
    torch_state = (
        require_dict(saved.pop(_TORCH), _TORCH) if _TORCH in saved else {key: saved.pop(key) for key in list(saved)}
    )
    groups = require_each(torch_state.get("param_groups", []), require_dict, "param_groups")
    states = dict_or_empty(torch_state.get("state"), "state")
    masters = [master for group in saved.get(_MASTERS) or () for master in require_type(group, list, _MASTERS)]
    return IndexedOptimizer(flattening, groups, states, masters, saved)


def put_unpartitioned_states(gathering: Gathering, model: ModelStates) -> None:
    """Put the model and the optimizer: by name if the parameter order is certain, else by parameter index."""
    optimizer = read_indexed_optimizer(model.flattening, model.optimizer)
    names: Names = {}
    if len(optimizer.groups) == 1:
        names = dict(enumerate(find_names_in_order(optimizer, optimizer.indices_by_group[0], trained_shapes(model))))
    masters = master_weights_by_name(optimizer, names)
    for name, value in (model.module or {}).items():
        put_weight(gathering, model.flattening, str(name), value, masters)
    put_states(gathering, optimizer, names)
    params = [[names.get(number, number) for number in numbers] for numbers in optimizer.indices_by_group]
    put_groups(gathering, optimizer, params, has_masters=bool(masters))


def put_states(gathering: Gathering, optimizer: IndexedOptimizer, names: Names, indices: range | None = None) -> None:
    """Put the optimizer states of all parameters, or only of the parameter indices in `indices`."""
    for number, state in optimizer.states.items():
        if indices is None or require_count(number, "state") in indices:
            for state_name, value in require_dict(state, "state").items():
                name = names.get(int(number), str(number))
                gathering.put_flattened(optimizer.flattening, value, (*STATE, name, state_name))


def put_groups(
    gathering: Gathering, optimizer: IndexedOptimizer, params: Sequence[Sequence[str | int]], *, has_masters: bool
) -> None:
    """Put the parameter groups with the parameters `params`, and the other optimizer entries.

    Leaves out the master weights if they were put before.
    """
    for i, (group, listed) in enumerate(zip(optimizer.groups, params, strict=True)):
        is_recorded = PARAM_NAMES in group and all(isinstance(name, str) for name in listed)
        settings = {**group, PARAM_NAMES: list(listed)} if is_recorded else group
        gathering.put_group(optimizer.flattening, i, settings, list(listed))
    for key, value in optimizer.others.items():
        if not (has_masters and key == _MASTERS):
            gathering.put_flattened(optimizer.flattening, as_plain_values(value), (STATE[0], key))


def master_weights_by_name(optimizer: IndexedOptimizer, names: Names) -> dict[str, StoredTensor]:
    """Return the fp32 master weights by name; {} if the parameter order is not certain."""
    if not (names and optimizer.masters):
        return {}
    stored = map(optimizer.flattening.make_stored_tensor, optimizer.masters)
    return dict(zip(names.values(), stored, strict=True))


def put_weight(
    gathering: Gathering, flattening: Flattening, name: str, value: Any, masters: Mapping[str, StoredTensor]
) -> None:
    """Put an entry of the model.

    If it has a master weight, put that weight instead, with the entry as its low-precision twin.
    """
    if name not in masters:
        gathering.put_flattened(flattening, value, (MODEL, name))
        return
    gathering.put_entry((MODEL, name), masters[name])
    gathering.twins[f"{MODEL}.{name}"] = flattening.make_stored_tensor(value)


def find_names_in_order(
    optimizer: IndexedOptimizer, indices: Sequence[Any], parameters: Mapping[str, Shape], *, is_in_order: bool = False
) -> list[str]:
    """Return the parameter names of an optimizer in index order; [] if the order is not certain.

    The order comes from recorded names, from shapes that allow only one assignment, or from `parameters` if
    `is_in_order`. The shapes of all optimizer states and master weights must agree with it.
    """
    moments: dict[int, Shape] = {}
    for number, state in optimizer.states.items():
        values = require_dict(state, "state").values()
        shapes = {require_tensor_shape(value) for value in values if is_pickled_tensor(value)} - {()}
        if len(shapes) == 1:
            moments[require_count(number, "state")] = shapes.pop()
    masters = {number: require_tensor_shape(value) for number, value in enumerate(optimizer.masters)}
    try:
        recorded = read_recorded_names(
            optimizer.indices_by_group, [group.get(PARAM_NAMES) for group in optimizer.groups]
        )
        if recorded:
            name_of_index = parameters_by_index(recorded, moments, parameters)
        elif is_in_order:
            name_of_index = dict(zip(sorted(indices), parameters, strict=False))
        else:
            name_of_index = match_by_size([indices], masters or moments, parameters)
    except (Corrupt, Mismatch, Unsupported):
        return []
    parameters = {name_of_index[number]: parameters[name_of_index[number]] for number in sorted(name_of_index)}
    if not is_counted_from_zero([indices]) or len(masters or moments) != len(parameters):
        return []
    agrees = [match_or_none(match_in_order, [indices], known, parameters) is not None for known in (moments, masters)]
    return list(parameters) if all(agrees) else []


def trained_shapes(model: ModelStates) -> dict[str, Shape]:
    """Return the shapes of the tensors that may be trained, in model order; tied tensors once."""
    seen: set[tuple[str, int, Shape]] = set()
    shapes: dict[str, Shape] = {}
    for name, value in (model.module or {}).items():
        if not is_pickled_tensor(value) or name in model.buffers or name in model.frozen:
            continue
        tensor = as_tensor_record(value)
        storage_view = (tensor.key, tensor.offset, tensor.shape)
        if storage_view not in seen:
            seen.add(storage_view)
            shapes[str(name)] = tensor.shape
    return shapes


def require_tensor_shape(value: Any) -> Shape:
    """Return the shape of a tensor. Raises `Corrupt` for anything else."""
    if not is_pickled_tensor(value):
        raise Corrupt(f"expected only tensors in `{_MASTERS}`, found something else")
    return as_tensor_record(value).shape
