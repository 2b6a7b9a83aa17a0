"""Convert an optimizer between parameter indices and parameter names. Only key paths change.

torch's optimizers index their parameters: `state.0.exp_avg`, and lists of indices in `param_groups`. The state of a
sharded optimizer is keyed by name (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`), because every
rank has a different shard of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.flatten import find_dict_items
from ckptkit.formats.archives.non_tensor_entries import load_value, with_new_value
from ckptkit.layout import KeyPath, Layout, edits
from ckptkit.layout.box import Shape
from ckptkit.layout.match_parameters import check_indices
from ckptkit.layout.wrappers import names_match_ignoring_wrappers, read_recorded_names
from ckptkit.models.names.rename_parameters import ELEMENTWISE, SECOND_MOMENTS, is_list_of_names, is_list_of_parameters

NAMES, IDS = "names", "ids"
_STATE, _GROUPS = "state", "param_groups"
_NO_GROUP = "the optimizer has a state for this parameter, but no group contains the parameter"
_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")  # of a matrix, in Adafactor


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer at a key path: the entries with its groups' parameter lists, and the parameters in each list.

    `name_lists` are the entries where torch recorded the names of a group's parameters, "" for a group without a
    record.
    """

    above: KeyPath
    lists: tuple[str, ...]
    groups: tuple[tuple[Any, ...], ...]
    name_lists: tuple[str, ...]

    @property
    def has_parameter_indices(self) -> bool:
        return all(type(number) is int for group in self.groups for number in group)

    @property
    def has_parameter_names(self) -> bool:
        return all(isinstance(name, str) for group in self.groups for name in group)

    @property
    def name(self) -> str:
        return ".".join(map(str, self.above)) or "optimizer"


def find_parameter_key_kind(layout: Layout) -> str | None:
    """Return "names" or "ids" by the key paths of optimizer states; None without an optimizer, or for a mix."""
    keys = map(layout.key, layout.tensors)
    kinds = {IDS if str(key[-2]).isdecimal() else NAMES for key in keys if len(key) > 2 and key[-3] == _STATE}
    if any(str(key[-1]).startswith(f"{_STATE}.") for key in map(layout.key, layout.tensors)):
        kinds.add(NAMES)
    return kinds.pop() if len(kinds) == 1 else None


def with_separate_group_settings(layout: Layout) -> Layout:
    """Return a layout with one entry for each setting of an optimizer's group, as torch 2.4 and later store it.

    Earlier versions store all groups of an optimizer as one entry. Source: `flatten_state_dict` in
    torch/distributed/checkpoint/_nested_dict.py of torch 2.3 (`_traverse_v_2_3` in later versions).
    """
    joined = [name for name in layout.blobs if layout.key(name)[-1] == _GROUPS]
    if not joined:
        return layout
    blobs = {name: blob for name, blob in layout.blobs.items() if name not in joined}
    keys = {name: layout.key(name) for name in layout.names if name not in joined}
    for name in joined:
        key, blob = layout.key(name), layout.blobs[name]
        value = load_value(layout.root, blob)
        groups = [find_dict_items(group) or () for group in value] if isinstance(value, list) else []
        settings = [((*key, i, name), setting) for i, pairs in enumerate(groups) for name, setting in pairs]
        entries = [(new, with_new_value(blob, setting)) for new, setting in settings]
        for new, setting in entries if groups and all(groups) else [(key, blob)]:
            dotted = ".".join(map(str, new))
            blobs[dotted], keys[dotted] = setting, new
    return replace(layout, blobs=blobs, keys=keys)


def find_optimizers(layout: Layout) -> list[Optimizer]:
    """Return the optimizers in torch's nested form. Reads the parameter lists of their groups.

    Raises `Corrupt` for an entry that is not a list of parameters.
    """
    layout = with_separate_group_settings(layout)
    lists: dict[KeyPath, dict[int, str]] = {}
    recorded: dict[KeyPath, str] = {}
    for name in layout.blobs:
        key = layout.key(name)
        if len(key) > 2 and isinstance(key[-2], int):
            if is_list_of_parameters(key):
                lists.setdefault(key[:-3], {})[key[-2]] = name
            elif is_list_of_names(key):
                recorded[key[:-1]] = name
    optimizers = []
    for above, entries in lists.items():
        groups = []
        for _, name in sorted(entries.items()):
            value = load_value(layout.root, layout.blobs[name])
            if not isinstance(value, list) or not all(type(item) in (int, str) for item in value):
                raise Corrupt("expected a list of the group's parameters", path=layout.path, tensor=name)
            groups.append(tuple(value))
        names = tuple(recorded.get((*above, _GROUPS, i), "") for i in sorted(entries))
        optimizer = Optimizer(above, tuple(entries[i] for i in sorted(entries)), tuple(groups), names)
        if not (optimizer.has_parameter_indices or optimizer.has_parameter_names):
            message = "expected either parameter indices or names in the optimizer's groups, found both"
            raise Corrupt(message, path=layout.path, tensor=optimizer.name)
        optimizers.append(optimizer)
    return optimizers


def recorded_names_by_index(layout: Layout, optimizer: Optimizer) -> dict[Any, str]:
    """Return torch's recorded name of each index, or {}. Raises `Unsupported` unless it names each index once."""
    lists = optimizer.name_lists
    values = [load_value(layout.root, layout.blobs[name]) if name else None for name in lists]
    return read_recorded_names(optimizer.groups, values)


def parameter_shapes_of(layout: Layout, optimizer: Optimizer, *, skip_unknown: bool = False) -> dict[int, Shape]:
    """Return the shape of each parameter that has state tensors, by its index.

    Raises `Corrupt` for an index that the groups list twice, and for a state without a group, `Unsupported` for a state
    that does not show the parameter's shape, unless `skip_unknown`.
    """
    check_indices(optimizer.groups)
    numbers = {str(number): number for group in optimizer.groups for number in group}
    shapes: dict[int, Shape] = {}
    for parameter, entries in states_by_parameter(layout, optimizer).items():
        if parameter not in numbers:
            raise Corrupt(_NO_GROUP, path=layout.path, tensor=next(iter(entries.values())))
        state = {kind: layout.tensors[name].spec.shape for kind, name in entries.items() if name in layout.tensors}
        with suppress(Unsupported) if skip_unknown else nullcontext():
            shape = find_parameter_shape(state)
            shapes |= {} if shape is None else {numbers[parameter]: shape}
    return shapes


def indices_by_name(layout: Layout, optimizer: Optimizer) -> dict[Any, str | int]:
    """Return torch's index of each name, group by group. Raises `Corrupt` for a name in two groups or in none."""
    every = [name for group in optimizer.groups for name in group]
    numbers: dict[Any, str | int] = {name: number for number, name in enumerate(every)}
    if len(numbers) < len(every):
        (repeated, _), *_ = Counter(every).most_common(1)
        raise Corrupt("the optimizer's groups list this parameter twice", path=layout.path, tensor=repeated)
    if strays := states_by_parameter(layout, optimizer).keys() - numbers.keys():
        raise Corrupt(_NO_GROUP, path=layout.path, tensor=min(strays))
    return numbers


def with_parameter_keys(layout: Layout, optimizer: Optimizer, new_keys: Mapping[Any, str | int]) -> Layout:
    """Return the layout with other names or indices for the parameters of an optimizer.

    If names become indices, they replace torch's recorded names where those differ.
    """
    steps = {str(old): str(new) for old, new in new_keys.items()}
    keys = {name: layout.key(name) for name in layout.names}
    at = len(optimizer.above) + 1
    for name, key in state_key_paths(layout, optimizer).items():
        keys[name] = (*key[:at], steps[str(key[at])], *key[at + 1 :])
    blobs = dict(layout.blobs)
    for name, record, group in zip(optimizer.lists, optimizer.name_lists, optimizer.groups, strict=True):
        if name in blobs:
            blobs[name] = with_new_value(blobs[name], [new_keys[parameter] for parameter in group])
        if (
            record in blobs
            and optimizer.has_parameter_names
            and not names_match_ignoring_wrappers(load_value(layout.root, blobs[record]), group)
        ):
            blobs[record] = with_new_value(blobs[record], list(group))
    return edits.with_new_key_paths(replace(layout, blobs=blobs), keys)


def state_key_paths(layout: Layout, optimizer: Optimizer) -> dict[str, KeyPath]:
    """Return the key paths of all states of an optimizer, by entry name."""
    start = (*optimizer.above, _STATE)
    keys = ((name, layout.key(name)) for name in layout.names)
    return {name: key for name, key in keys if key[: len(start)] == start and len(key) > len(start)}


def states_by_parameter(layout: Layout, optimizer: Optimizer) -> dict[str, dict[str, str]]:
    """Return the state entries of an optimizer: parameter (or its index as text) -> kind of state -> entry name."""
    states: dict[str, dict[str, str]] = {}
    at = len(optimizer.above) + 1
    for name, key in state_key_paths(layout, optimizer).items():
        states.setdefault(str(key[at]), {})[".".join(map(str, key[at + 1 :]))] = name
    return states


def find_parameter_shape(state_shapes: Mapping[str, Shape]) -> Shape | None:
    """Return the shape of a state's parameter; None without tensors. Raises `Unsupported` if no tensor shows it."""
    known = {name: shape for name, shape in state_shapes.items() if name.rpartition(".")[2] in ELEMENTWISE}
    first_moments = {shape for name, shape in known.items() if name.rpartition(".")[2] not in SECOND_MOMENTS}
    shapes = first_moments or set(known.values())
    if len(shapes) == 1:
        return shapes.pop()
    if all(name in state_shapes for name in _FACTORS):
        rows, columns = (state_shapes[name] for name in _FACTORS)
        return (*rows, *columns[-1:])
    if state_shapes.keys() - {"step"}:
        raise Unsupported(f"expected a state with the parameter's shape, found only {', '.join(sorted(state_shapes))}")
    return None
