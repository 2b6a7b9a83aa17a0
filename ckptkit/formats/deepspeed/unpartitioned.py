"""Read the model and the optimizer of a run without ZeRO: one file has both.

Source: `_save_checkpoint` in deepspeed/runtime/engine.py, `state_dict` in deepspeed/runtime/fp16/unfused_optimizer.py.
The optimizer is torch's, with numbers for its parameters; with 16 bits there are fp32 masters too, a list for a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.errors import Corrupt
from ckptkit.formats.deepspeed.gathering import GROUPS, MODEL, STATE, Gathering
from ckptkit.formats.deepspeed.model_states import ModelStates
from ckptkit.formats.deepspeed.values import as_count, as_dict, as_kind, dict_or_none, without_classes
from ckptkit.formats.torchfile.read_archive import as_tensor, is_tensor
from ckptkit.tensors.box import Shape

_MASTERS = "fp32_groups"
_TORCH = "optimizer_state_dict"


def put_unpartitioned(gathering: Gathering, model: ModelStates) -> None:
    """Put model and optimizer, that by name where the order of its parameters is certain, else by its own numbers."""
    saved = dict_or_none(model.optimizer, "optimizer")
    torchs = as_dict(saved.pop(_TORCH), _TORCH) if _TORCH in saved else {key: saved.pop(key) for key in list(saved)}
    groups = [as_dict(group, "param_groups") for group in as_kind(torchs.get("param_groups", []), list, "param_groups")]
    states = dict_or_none(torchs.get("state"), "state")
    names = dict(enumerate(names_in_order(model, groups, states, saved)))
    masters = masters_of(saved, names)
    for name, value in (model.module or {}).items():
        put_weight(gathering, model, str(name), value, masters)
    for number, state in states.items():
        name = names.get(as_count(number, "state"), str(number))
        for what, value in as_dict(state, "state").items():
            gathering.flatten(model.flattening, value, (*STATE, name, what))
    for i, group in enumerate(groups):
        params = [names.get(number, number) for number in as_kind(group.get("params"), list, "params")]
        for key, value in {**group, "params": params}.items():
            gathering.flatten(model.flattening, value, (*GROUPS, i, key))
    for key, value in saved.items():
        if not (masters and key == _MASTERS):
            gathering.flatten(model.flattening, without_classes(value), (STATE[0], key))


def masters_of(saved: Mapping[str | int, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the fp32 masters by name, none where no order is certain."""
    masters = [value for group in saved.get(_MASTERS) or () for value in as_kind(group, list, _MASTERS)]
    return dict(zip(names.values(), masters, strict=True)) if names and masters else {}


def put_weight(gathering: Gathering, model: ModelStates, name: str, value: Any, masters: Mapping[str, Any]) -> None:
    """Put an entry of the model, and where it has a master that in its place, with the entry as its rounded copy."""
    if name not in masters:
        gathering.flatten(model.flattening, value, (MODEL, name))
        return
    gathering.put((MODEL, name), model.flattening.stored(masters[name]))
    gathering.put_twin((MODEL, name), model.flattening.stored(value))


def names_in_order(
    model: ModelStates,
    groups: list[dict[str | int, Any]],
    states: Mapping[str | int, Any],
    saved: Mapping[str | int, Any],
) -> list[str]:
    """Return the names of the optimizer's parameters in the order of their numbers, [] where that is not certain.

    With one group it is that of the model, from which buffers and tied copies are left out; shapes have to say so too.
    """
    if len(groups) != 1:
        return []
    numbers = as_kind(groups[0].get("params"), list, "params")
    parameters = dict(trained(model))
    shapes = list(parameters.values())
    if numbers != list(range(len(shapes))):
        return []
    known = dict(shapes_in(states))
    masters = [shape_of(value) for group in saved.get(_MASTERS) or () for value in as_kind(group, list, _MASTERS)]
    if not (known or masters) or any(shapes[i] != shape for i, shape in known.items() if i < len(shapes)):
        return []
    return list(parameters) if masters in ([], shapes) and (masters or len(known) == len(shapes)) else []


def trained(model: ModelStates) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of a model that may be trained, tied ones once, with their shapes."""
    seen: set[tuple[str, int, Shape]] = set()
    for name, value in (model.module or {}).items():
        if not is_tensor(value) or name in model.buffers:
            continue
        tensor = as_tensor(value)
        place = (tensor.key, tensor.offset, tensor.shape)
        if place not in seen:
            seen.add(place)
            yield str(name), tensor.shape


def shapes_in(states: Mapping[str | int, Any]) -> Iterator[tuple[int, Shape]]:
    """Yield the shape of the moments of each numbered parameter that has any."""
    for number, state in states.items():
        shapes = {shape_of(value) for value in as_dict(state, "state").values() if is_tensor(value)} - {()}
        if len(shapes) == 1:
            yield as_count(number, "state"), shapes.pop()


def shape_of(value: Any) -> Shape:
    """Return the shape of a tensor. Raises `Corrupt` for anything else."""
    if not is_tensor(value):
        raise Corrupt(f"`{_MASTERS}` has something else than tensors")
    return as_tensor(value).shape
