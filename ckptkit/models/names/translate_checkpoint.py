"""Translate a training checkpoint: the model's parameters, and every optimizer entry that belongs to a parameter.

A state with one element per element of its parameter is cut, joined and permuted as the parameter is. A single number,
such as the step, is copied to each result; if several parameters are merged, their numbers must be equal. Any other
state, such as a preconditioner, can only be renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

from ckptkit.engine.read import read_box
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats.archives.non_tensor_entries import load_value, with_new_value
from ckptkit.layout import Blob, KeyPath, Layout, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.edits import require_nestable_key_paths
from ckptkit.layout.wrappers import parameter_name_in_model
from ckptkit.models.names.rename_parameters import (
    BY_PARAMETER,
    ELEMENTWISE,
    GROUP_MAP,
    EntryPlace,
    find_entry_place,
    is_list_of_names,
    is_list_of_parameters,
)
from ckptkit.models.names.translate import Translated, Turn
from ckptkit.models.names.weights import Weights

_HALVES = ("_w", "_v")  # suffixes of the two saved halves of a gated layer
Origins = Mapping[str, tuple[str, ...]]  # the old names of each new name


@dataclass(frozen=True, slots=True)
class ParameterEntries:
    """The entries of one kind, by the name of their parameter."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)


def translate_checkpoint(
    layout: Layout, model_tensors: Weights, prefix: KeyPath, turn: Turn
) -> tuple[Layout, Translated]:
    """Return a located checkpoint with its parameters translated by `turn`, and the translated weights.

    `model_tensors` are under `prefix`. Raises `Unsupported` for an optimizer with parameter indices, and for a state
    that is neither elementwise nor a single number; `Mismatch` for merged parameters whose numbers or groups differ.
    """
    names = {old: new for new, old in model_tensors.came_from.items()}
    weights = turn(model_tensors.layout.tensors)
    kinds, rest = entries_by_kind(layout, names, prefix)
    tensors = {name: layout.tensors[name] for name in rest if name in layout.tensors}
    blobs = {name: layout.blobs[name] for name in rest if name in layout.blobs}
    keys = {name: layout.key(name) for name in rest}
    for place, entries in kinds.items():
        translated = weights
        if place != EntryPlace(prefix):
            translated = translate_states(layout, entries, model_tensors.layout, weights, turn, place)
        for name, tensor in translated.tensors.items():
            key = place.key_of_parameter(name)
            tensors[dotted_key(key)], keys[dotted_key(key)] = tensor, key
        for name, blob in blobs_for_new_parameters(layout, entries.blobs, weights.came_from, place).items():
            key = place.key_of_parameter(name)
            blobs[dotted_key(key)], keys[dotted_key(key)] = blob, key
    for name, blob in blobs.items():
        if is_list_of_parameters(keys[name]) or is_list_of_names(keys[name]):
            blobs[name] = rename_group_list(layout, name, blob, weights.came_from, names)
    require_nestable_key_paths(layout, keys)
    return replace(layout, tensors=tensors, blobs=blobs, keys=keys, twins={}), weights


def dotted_key(key: KeyPath) -> str:
    return ".".join(map(str, key))


def entries_by_kind(
    layout: Layout, weights: Mapping[str, str], prefix: KeyPath
) -> tuple[dict[EntryPlace, ParameterEntries], list[str]]:
    """Return the entries of parameters by kind, and the names of all others. `weights` are the model's entries."""
    own = set(weights.values())
    kinds: dict[EntryPlace, ParameterEntries] = {EntryPlace(prefix): ParameterEntries()}
    rest = []
    for name in layout.names:
        matches = (
            [(EntryPlace(prefix), weights[name])] if name in weights else list_parameter_entries(layout.key(name), own)
        )
        if not matches:
            rest.append(name)
        for place, parameter in matches:
            entries = kinds.setdefault(place, ParameterEntries())
            if parameter in entries.tensors or parameter in entries.blobs:
                raise Mismatch(f"`{parameter}` has this state twice", path=layout.path, tensor=name)
            if name in layout.tensors:
                entries.tensors[parameter] = layout.tensors[name]
            else:
                entries.blobs[parameter] = layout.blobs[name]
    return kinds, rest


def list_parameter_entries(key: KeyPath, own: set[str]) -> list[tuple[EntryPlace, str]]:
    """Return the kind and parameter of an optimizer's entry; two of them for an entry of both halves of a parameter."""
    entry = find_parameter_entry(key, own)
    if entry or key[-3:-2] != (GROUP_MAP,):
        return [entry] if entry else []
    place = EntryPlace(key[:-2], "{}", key[-1:])
    return [half for end in _HALVES if (half := find_entry_of_own_parameter(place, f"{key[-2]}{end}", own))]


def find_parameter_entry(key: KeyPath, own: set[str]) -> tuple[EntryPlace, str] | None:
    """Return the kind and parameter (of `own`) of an optimizer's entry, or None. Raises `Unsupported` for indices."""
    entry = find_entry_place(key, own)
    if entry is None:
        return None
    place, parameter = entry
    if parameter.isdecimal():
        hint = "pass --optimizer-keys names to name them first"
        raise Unsupported("expected parameter names in the optimizer, found indices", tensor=dotted_key(key), hint=hint)
    return find_entry_of_own_parameter(place, parameter, own)


def find_entry_of_own_parameter(
    place: EntryPlace, parameter: str, own_names: set[str]
) -> tuple[EntryPlace, str] | None:
    name = parameter_name_in_model(parameter, own_names)
    return (place, name) if name in own_names else None


def translate_states(
    layout: Layout, entries: ParameterEntries, weights: Layout, translated: Translated, turn: Turn, place: EntryPlace
) -> Translated:
    """Return the states of one kind, translated as their parameters are."""
    shaped = elementwise_states(entries, weights, place)
    following = turn(shaped)
    other_states = {name: one for name, one in entries.tensors.items() if name not in shaped}
    for new, olds in translated.came_from.items():
        present = [old for old in olds if old in other_states]
        if not present:
            continue
        require_entry_of_all(layout, present, olds, place)
        one = other_states[present[0]]
        if len(olds) == 1 and translated.tensors[new] == weights.tensors[olds[0]]:  # only renamed: any state can follow
            following.tensors[new] = one
        elif one.spec.numel == 1:
            values = {
                old: read_tensor_bytes(layout, other_states[old]) for old in present if not other_states[old].is_lost
            }
            if values:
                require_equal_entries(layout, values, place)
            following.tensors[new] = other_states[next(iter(values), present[0])]
        else:
            shape = list(weights.tensors[present[0]].spec.shape)
            message = (
                f"expected a state of shape {shape}, one element for each of its parameter, because ckptkit reorders, "
                f"joins or cuts the parameter; found {list(one.spec.shape)}"
            )
            above = dotted_key(place.before[:-1] if place.before[-1] in BY_PARAMETER else place.before) or "state"
            hint = f"keep the names and rows, or drop the optimizer with --exclude '{above}.*'"
            raise Unsupported(
                message, path=layout.path, tensor=dotted_key(place.key_of_parameter(present[0])), hint=hint
            )
    return following


def elementwise_states(entries: ParameterEntries, weights: Layout, place: EntryPlace) -> dict[str, StoredTensor]:
    """Return the states of a kind if they have one element for each element of their parameter, otherwise {}.

    A square state may be a preconditioner of a square parameter. If no other state of its kind shows which it is, the
    kind must be known.
    """
    pairs = {name: (one.spec.shape, weights.tensors[name].spec.shape) for name, one in entries.tensors.items()}
    shaped = {name: one for name, one in entries.tensors.items() if pairs[name][0] == pairs[name][1]}
    if format_state_kind(place).rpartition(".")[2] in ELEMENTWISE:
        return shaped
    has_others = any(state != own and prod(state) != 1 for state, own in pairs.values())
    is_plain = any(state == own and len(set(state)) > 1 for state, own in pairs.values())
    is_shown = is_plain or all(len(state) < 2 for state, _ in pairs.values())
    return {} if has_others or not is_shown else shaped


def format_state_kind(entry_place: EntryPlace) -> str:
    """Return the name of a kind of entries: `exp_avg`, `GG.0`."""
    flattened = entry_place.text.partition("{}.")[2]
    return flattened or ".".join(map(str, entry_place.after or entry_place.before[-1:]))


def blobs_for_new_parameters(
    layout: Layout, blobs: Mapping[str, Blob], origins: Origins, place: EntryPlace
) -> dict[str, Blob]:
    """Return the non-tensor entries of one kind for the new parameters."""
    copied = {}
    for new, olds in origins.items():
        present = [old for old in olds if old in blobs]
        if present:
            require_entry_of_all(layout, present, olds, place)
            if len(present) > 1:
                require_equal_entries(layout, {old: load_value(layout.root, blobs[old]) for old in present}, place)
            copied[new] = blobs[present[0]]
    return copied


def require_entry_of_all(layout: Layout, present: Iterable[str], olds: Iterable[str], place: EntryPlace) -> None:
    """Raise `Mismatch` if some of the parameters that are merged do not have the entry."""
    missing = [old for old in olds if old not in present]
    if missing:
        here = dotted_key(place.key_of_parameter(next(iter(present))))
        message = f"missing: `{here}` is here, and the two become one entry"
        raise Mismatch(message, path=layout.path, tensor=dotted_key(place.key_of_parameter(missing[0])))


def require_equal_entries(layout: Layout, values: Mapping[str, Any], place: EntryPlace) -> None:
    """Raise `Mismatch` if parameters that are merged differ in an entry."""
    (first, value), *others = values.items()
    other = next((name for name, one in others if one != value), None)
    if other is not None:
        message = f"expected the same state as `{other}`, because the two become one parameter, found another state"
        raise Mismatch(message, path=layout.path, tensor=dotted_key(place.key_of_parameter(first)))


def read_tensor_bytes(layout: Layout, tensor: StoredTensor) -> bytes:
    one = replace(layout, tensors={"": tensor}, blobs={}, keys={}, twins={})
    return bytes(read_box(one, "", full_box(tensor.spec.shape), jobs=1))


def rename_group_list(layout: Layout, name: str, blob: Blob, origins: Origins, weights: Mapping[str, str]) -> Blob:
    """Return the list of a group's parameters under their new names. Unknown names do not change."""
    value = load_value(layout.root, blob)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        message = "expected parameter names in the optimizer, found indices"
        raise Unsupported(message, path=layout.path, tensor=name)
    own = set(weights.values())
    listed = {one: parameter_name_in_model(one, own) for one in value}
    known = own.intersection(listed.values())
    new_names: dict[str, list[str]] = {}
    for new, olds in origins.items():
        listed_olds = [old for old in olds if old in known]
        if listed_olds and len(listed_olds) < len(olds):
            message = f"`{listed_olds[0]}` is in this group, but not all parameters that it is merged with"
            raise Mismatch(message, path=layout.path, tensor=name)
        for old in listed_olds[:1]:
            new_names.setdefault(old, []).append(new)
    names = [new_names.get(old, []) if old in own else [one] for one, old in listed.items()]
    return with_new_value(blob, list(chain.from_iterable(names)))
