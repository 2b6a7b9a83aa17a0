"""Read the model and the optimizer of a run without ZeRO: one file has both.

Source: `_save_checkpoint` in deepspeed/runtime/engine.py, `state_dict` in deepspeed/runtime/fp16/unfused_optimizer.py.
The optimizer is torch's, with numbers for its parameters; with 16 bits there are fp32 masters too, a list for a group.
The training script passes the parameters to `deepspeed.initialize`, in any order: only recorded names or shapes of
their own tell which parameter a number is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported
from ckptkit.formats.archives.flatten import FlatState, Flattening
from ckptkit.formats.pickles.tensor_calls import as_tensor, is_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, KeyPath, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.matching import is_counted_through, match_by_size, match_if_certain
from ckptkit.layout.wrappers import PARAM_NAMES, match_recorded, read_recorded
from ckptkit.plugins.deepspeed.auto_experts import LAYERS
from ckptkit.plugins.deepspeed.model_states import ModelStates
from ckptkit.plugins.deepspeed.values import as_count, as_dict, as_kind, dict_or_none, without_classes

Settings = Mapping[str | int, Any]

MODEL = "model"
STATE = ("optimizer", "state")
GROUPS = ("optimizer", "param_groups")
# entries that stay whole, although they are dicts or lists
_IN_ONE = frozenset(["ds_config", "universal_checkpoint_info", LAYERS])


@dataclass(slots=True)
class Gathering:
    """The result as it grows: tensors and entries by name, and by the name of a tensor its rounded twin."""

    flat: FlatState = field(default_factory=FlatState)
    twins: dict[str, StoredTensor] = field(default_factory=dict)

    def put(self, key: KeyPath, stored: StoredTensor | Blob) -> None:
        """Put a tensor or an entry where a key path leads. Raises `Unsupported` if there is one."""
        name = ".".join(map(str, key))
        if name in self.flat.keys:
            raise Unsupported("two entries have the same name", tensor=name)
        self.flat.keys[name] = key
        if isinstance(stored, Blob):
            self.flat.blobs[name] = stored
        else:
            self.flat.tensors[name] = stored

    def put_twin(self, key: KeyPath, twin: StoredTensor) -> None:
        """Put a second, rounded copy beside the tensor that a key path leads to."""
        self.twins[".".join(map(str, key))] = twin

    def flatten(self, flattening: Flattening, value: Any, key: KeyPath) -> None:
        """Put all that a value of a file holds under a key path."""
        flattening.flat = self.flat
        flattening.add(value, key)

    def put_state(self, flattening: Flattening, names: list[str], values: Mapping[str, Any]) -> None:
        """Put values of the optimizer's state, which several parameters have in common, below each of their names."""
        for what, value in values.items():
            try:
                stored = flattening.stored(value) if is_tensor(value) else flattening.blob(value)
            except CkptError as error:
                raise error.blame(tensor=".".join((*STATE, names[0], what)) if names else what) from None
            for name in names:
                self.put((*STATE, name, what), stored)

    def put_group(self, flattening: Flattening, number: int, settings: Settings, names: list[str]) -> None:
        """Put the hyperparameters of a group of parameters, and the names of these."""
        for key, value in settings.items():
            if key != "params":
                stored = flattening.stored(value) if is_tensor(value) else flattening.blob(value)
                self.put((*GROUPS, number, key), stored)
        self.put((*GROUPS, number, "params"), Blob(flattening.path, flattening.pickle.offset, 0, dump(names)))

    def put_other(self, flattening: Flattening, key: str | int, value: Any) -> None:
        """Put an entry under its own key, unless the model or the optimizer lies there."""
        way = ("client_state", key) if key in (MODEL, STATE[0]) else (key,)
        value = without_classes(value)
        if key in _IN_ONE:
            self.put(way, flattening.blob(value))
        else:
            self.flatten(flattening, value, way)


_MASTERS = "fp32_groups"
_TORCH = "optimizer_state_dict"
Names = Mapping[int, str]  # of parameters, by their numbers


@dataclass(frozen=True, slots=True)
class Numbered:
    """An optimizer with numbers for its parameters, in a file: groups, states, fp32 masters, and all else it saved."""

    flattening: Flattening
    groups: Sequence[Mapping[str | int, Any]]
    states: Mapping[str | int, Any]
    masters: Sequence[Any]
    others: Mapping[str | int, Any]

    @property
    def numbers(self) -> list[list[Any]]:
        return [as_kind(group.get("params"), list, "params") for group in self.groups]


def read_numbered(flattening: Flattening, value: Any) -> Numbered:
    """Return the optimizer that was saved as `value`; None stands for one without states."""
    saved = dict_or_none(value, "optimizer")
    torchs = as_dict(saved.pop(_TORCH), _TORCH) if _TORCH in saved else {key: saved.pop(key) for key in list(saved)}
    groups = [as_dict(group, "param_groups") for group in as_kind(torchs.get("param_groups", []), list, "param_groups")]
    states = dict_or_none(torchs.get("state"), "state")
    masters = [master for group in saved.get(_MASTERS) or () for master in as_kind(group, list, _MASTERS)]
    return Numbered(flattening, groups, states, masters, saved)


def put_unpartitioned(gathering: Gathering, model: ModelStates) -> None:
    """Put model and optimizer, that by name where the order of its parameters is certain, else by its own numbers."""
    optimizer = read_numbered(model.flattening, model.optimizer)
    names: Names = {}
    if len(optimizer.groups) == 1:
        names = dict(enumerate(names_in_order(optimizer, optimizer.numbers[0], trained(model))))
    masters = masters_of(optimizer, names)
    for name, value in (model.module or {}).items():
        put_weight(gathering, model.flattening, str(name), value, masters)
    put_states(gathering, optimizer, names)
    params = [[names.get(number, number) for number in numbers] for numbers in optimizer.numbers]
    put_groups(gathering, optimizer, params, has_masters=bool(masters))


def put_states(gathering: Gathering, optimizer: Numbered, names: Names, among: range | None = None) -> None:
    """Put the states of the parameters, or of those with numbers `among` these."""
    for number, state in optimizer.states.items():
        if among is None or as_count(number, "state") in among:
            for what, value in as_dict(state, "state").items():
                name = names.get(int(number), str(number))
                gathering.flatten(optimizer.flattening, value, (*STATE, name, what))


def put_groups(
    gathering: Gathering, optimizer: Numbered, params: Sequence[Sequence[str | int]], *, has_masters: bool
) -> None:
    """Put the groups, with what they list, and all that the optimizer has saved besides, but masters that are put."""
    for i, (group, listed) in enumerate(zip(optimizer.groups, params, strict=True)):
        is_recorded = PARAM_NAMES in group and all(isinstance(one, str) for one in listed)
        own: dict[str | int, Any] = {**group, "params": list(listed)}
        if is_recorded:
            own[PARAM_NAMES] = list(listed)
        for key, value in own.items():
            gathering.flatten(optimizer.flattening, value, (*GROUPS, i, key))
    for key, value in optimizer.others.items():
        if not (has_masters and key == _MASTERS):
            gathering.flatten(optimizer.flattening, without_classes(value), (STATE[0], key))


def masters_of(optimizer: Numbered, names: Names) -> dict[str, StoredTensor]:
    """Return the fp32 masters by name, none where no order is certain."""
    if not (names and optimizer.masters):
        return {}
    stored = map(optimizer.flattening.stored, optimizer.masters)
    return dict(zip(names.values(), stored, strict=True))


def put_weight(
    gathering: Gathering, flattening: Flattening, name: str, value: Any, masters: Mapping[str, StoredTensor]
) -> None:
    """Put an entry of the model, and where it has a master that in its place, with the entry as its rounded copy."""
    if name not in masters:
        gathering.flatten(flattening, value, (MODEL, name))
        return
    gathering.put((MODEL, name), masters[name])
    gathering.put_twin((MODEL, name), flattening.stored(value))


def names_in_order(
    optimizer: Numbered, numbers: Sequence[Any], parameters: Mapping[str, Shape], *, is_in_order: bool = False
) -> list[str]:
    """Return the names of an optimizer's parameters in the order of their numbers, [] if that is not certain.

    Recorded names decide, or shapes that allow only one assignment, or the order of `parameters` if the optimizer
    `is_in_order`. The shapes of all states and of all masters have to
    agree with it.
    """
    moments = dict(shapes_in(optimizer.states))
    masters = {number: shape_of(value) for number, value in enumerate(optimizer.masters)}
    try:
        recorded = read_recorded(optimizer.numbers, [group.get(PARAM_NAMES) for group in optimizer.groups])
        if recorded:
            found = match_recorded(recorded, moments, parameters)
        elif is_in_order:
            found = dict(zip(sorted(numbers), parameters, strict=False))
        else:
            found = match_by_size([numbers], masters or moments, parameters)
    except (Corrupt, Mismatch, Unsupported):
        return []
    parameters = {found[number]: parameters[found[number]] for number in sorted(found)}
    if not is_counted_through([numbers]) or len(masters or moments) != len(parameters):
        return []
    agrees = [match_if_certain([numbers], shapes, parameters) is not None for shapes in (moments, masters)]
    return list(parameters) if all(agrees) else []


def trained(model: ModelStates) -> dict[str, Shape]:
    """Return the shapes of a model's tensors that may be trained, tied ones once: no buffers."""
    seen: set[tuple[str, int, Shape]] = set()
    found: dict[str, Shape] = {}
    for name, value in (model.module or {}).items():
        if not is_tensor(value) or name in model.buffers:
            continue
        tensor = as_tensor(value)
        place = (tensor.key, tensor.offset, tensor.shape)
        if place not in seen:
            seen.add(place)
            found[str(name)] = tensor.shape
    return found


def shapes_in(states: Mapping[str | int, Any]) -> Iterator[tuple[int, Shape]]:
    """Yield the shape of the moments of each numbered parameter that has any."""
    for number, state in states.items():
        shapes = {shape_of(value) for value in as_dict(state, "state").values() if is_tensor(value)} - {()}
        if len(shapes) == 1:
            yield as_count(number, "state"), shapes.pop()


def shape_of(value: Any) -> Shape:
    """Return the shape of a tensor. Raises `Corrupt` for anything else."""
    if not is_tensor(value):
        raise Corrupt(f"expected only tensors in `{_MASTERS}`, found something else")
    return as_tensor(value).shape
