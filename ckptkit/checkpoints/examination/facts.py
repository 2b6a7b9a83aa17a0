"""What rules look at, the tensors and optimizer states of a model by parameter, and what they find: inconsistencies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ckptkit.checkpoints.optimizers.keys import (
    Optimizer,
    find_optimizers,
    recorded_names_by_index,
    with_separate_group_settings,
)
from ckptkit.checkpoints.salvage_account import read_account
from ckptkit.errors import Corrupt, Mismatch, Unsafe, Unsupported, and_more
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.layout import KeyPath, Layout
from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import may_be_adapter, without_common_ddp_prefix, without_prefixes_except_ddp
from ckptkit.models.names.rename_parameters import FLATTENED, split_flattened_key
from ckptkit.models.names.weights import training_state_names

_NUMBERED = re.compile(r"\b(?:layers|layer|h|blocks|block|experts)\.(\d+)\.(?=.)")
_STATE, _GROUPS = "state", "param_groups"
_UNREADABLE = (Corrupt, Unsafe, Unsupported)  # `verify` reports such entries in more detail


Members = Mapping[str, Mapping[int, Mapping[str, str]]]  # list of modules -> number -> rest of the path -> entry
States = Mapping[str, Mapping[str, str]]  # parameter -> kind of state -> entry name


@dataclass(frozen=True)
class Facts:
    """A checkpoint and the facts that follow from its key paths. Each fact is computed once."""

    layout: Layout

    @classmethod
    def of(cls, layout: Layout) -> Self:
        try:
            return cls(with_separate_group_settings(layout))
        except _UNREADABLE:
            return cls(layout)

    @cached_property
    def weights(self) -> Mapping[str, str]:
        """Return the tensors outside the training state: name in the checkpoint -> dotted key path."""
        training = training_state_names(self.layout)
        keys = {name: self.layout.key(name) for name in self.layout.tensors if name not in training}
        return {name: ".".join(map(str, key)) for name, key in keys.items() if _STATE not in key[:-1]}

    @cached_property
    def weight_entries_by_path(self) -> Mapping[str, str]:
        """Return the name in the checkpoint of each weight, by its dotted key path."""
        return {path: name for name, path in self.weights.items()}

    @cached_property
    def numbered_modules(self) -> Members:
        """Return the tensors in each list of layers or experts, also nested; {} for an adapter: it has few layers."""
        members: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        if may_be_adapter(self.weights.values()):
            return {}
        for name, path in self.weights.items():
            for match in _NUMBERED.finditer(path):
                members[path[: match.start(1) - 1]][int(match[1])][path[match.end() :]] = name
        return members

    @cached_property
    def shapes_by_name(self) -> Mapping[str, set[Shape]]:
        """Return the possible shapes for a parameter name; every suffix of a key path counts as a name.

        A tensor in a list gets no name: its position in the list is not a parameter index.
        """
        shapes: dict[str, set[Shape]] = defaultdict(set)
        for name in self.weights:
            key = self.layout.key(name)
            for start in range(len(key) if isinstance(key[-1], str) else 0):
                shapes[".".join(map(str, key[start:]))].add(self.layout.tensors[name].spec.shape)
        return shapes

    @cached_property
    def name_by_unwrapped_name(self) -> Mapping[str, str]:
        """Return the names of `shapes_by_name`, by the name without wrapper prefixes."""
        return {without_wrappers(name): name for name in self.shapes_by_name}

    @cached_property
    def states_by_optimizer(self) -> Mapping[KeyPath, States]:
        """Return the state tensors of all optimizers, by the optimizer's key path."""
        return self.states_among(self.layout.tensors)

    @cached_property
    def state_kinds_by_parameter(self) -> Mapping[KeyPath, Mapping[str, frozenset[str]]]:
        """Return the kinds of state that each parameter has in each optimizer, including non-tensor states."""
        kinds: dict[KeyPath, dict[str, frozenset[str]]] = defaultdict(dict)
        for above, states in self.states_among(self.layout.names).items():
            for parameter, entries in states.items():
                kinds[above][parameter] = frozenset(kind.partition(".")[0] for kind in entries)
        return kinds

    @cached_property
    def lost_entries(self) -> frozenset[str]:
        """Return the entries that a salvage lost: the checkpoint was written without them."""
        account = read_account(self.layout.root) or {}
        entries = account.get("lost")
        return frozenset(str(entry.get("name")) for entry in entries or () if isinstance(entry, dict))

    def states_among(self, names: Iterable[str]) -> Mapping[KeyPath, States]:
        """Return the entries with these names that are optimizer states, by the optimizer's key path."""
        by_optimizer: dict[KeyPath, dict[str, dict[str, str]]] = {}
        for name in names:
            if state := self.parse_state_key(self.layout.key(name)):
                above, parameter, kind = state
                by_optimizer.setdefault(above, {}).setdefault(parameter, {})[kind] = name
        return by_optimizer

    def is_weight_name(self, name: str) -> bool:
        """Return whether a weight has this name, ignoring wrapper prefixes."""
        return name in self.shapes_by_name or without_wrappers(name) in self.name_by_unwrapped_name

    def shapes_of_parameter(self, optimizer_key: KeyPath, parameter: str) -> set[Shape]:
        """Return the shapes of the weights that a parameter of the optimizer at a key path may be.

        Returns an empty set for an index without a recorded name, unless the optimizer lists parameters by name.
        """
        name = self.names_of_indices.get(optimizer_key, {}).get(parameter, parameter)
        if name.isdecimal() and optimizer_key not in self.optimizers_listing_names:
            return set()
        return self.shapes_by_name.get(self.name_by_unwrapped_name.get(without_wrappers(name), name), set())

    @cached_property
    def optimizers_listing_names(self) -> frozenset[KeyPath]:
        """Return the key paths of the optimizers whose groups list parameters by name."""
        return frozenset(optimizer.above for optimizer in self.optimizers if not optimizer.has_parameter_indices)

    def parse_state_key(self, key: KeyPath) -> tuple[KeyPath, str, str] | None:
        """Return the optimizer, parameter (or its index as text) and kind of a state's key path; None for other paths.

        Keys deeper below a parameter are joined by dots: `GG.0`.
        """
        last = str(key[-1])
        if last.startswith(FLATTENED[0]):
            parameter, _, kind = last.removeprefix(FLATTENED[0]).rpartition(".")
            return (key[:-1], parameter, kind) if parameter else None
        if _STATE not in key[:-2]:
            return None
        at = key.index(_STATE)
        first = str(key[at + 1])
        if at + 3 == len(key) and last in self.shapes_by_name and first not in self.shapes_by_name:
            return key[:at], last, first  # some optimizers have the kind first
        return key[:at], first, ".".join(map(str, key[at + 2 :]))

    @cached_property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Return the optimizers with their parameter groups; () if the groups are invalid."""
        try:
            return tuple(find_optimizers(self.layout))
        except _UNREADABLE:
            return ()

    @cached_property
    def names_of_indices(self) -> Mapping[KeyPath, Mapping[str, str]]:
        """Return the recorded name of each parameter by its index as text, by the optimizer's key path."""
        names: dict[KeyPath, Mapping[str, str]] = {}
        for optimizer in self.optimizers:
            with suppress(*_UNREADABLE):
                recorded = recorded_names_by_index(self.layout, optimizer) if optimizer.has_parameter_indices else {}
                names[optimizer.above] = {str(index): name for index, name in recorded.items()}
        return names

    def setting_values(self, optimizer_key: KeyPath, name: str) -> Iterator[object]:
        """Yield the values of a setting in the parameter groups of the optimizer at a key path."""
        at = len(optimizer_key)
        for entry, blob in self.layout.blobs.items():
            key = self.layout.key(entry)
            if key[:at] != optimizer_key:
                continue
            is_nested = key[at : at + 1] == (_GROUPS,) and key[-1] == name
            is_flat = len(key) == at + 1 and str(key[-1]).startswith(FLATTENED[1]) and str(key[-1]).endswith(f".{name}")
            if is_nested or is_flat:
                try:
                    yield load_value(self.layout.root, blob)
                except _UNREADABLE:
                    return

    def find_number(self, entry: str) -> int | None:
        """Return the integer in an entry that is not a tensor; None for anything else."""
        try:
            value = load_value(self.layout.root, self.layout.blobs[entry]) if entry in self.layout.blobs else None
        except _UNREADABLE:
            return None
        return value if type(value) is int else None

    def setting_names_by_parameter(self, optimizer_key: KeyPath) -> Mapping[str, frozenset[str]]:
        """Return the names of the settings that apply to each parameter of the optimizer at a key path."""
        settings_by_parameter: dict[str, set[str]] = defaultdict(set)
        members = {
            self.layout.key(entry)[:-1]: group
            for optimizer in self.optimizers
            if optimizer.above == optimizer_key
            for entry, group in zip(optimizer.lists, optimizer.groups, strict=True)
        }
        for entry in self.layout.names:
            key = self.layout.key(entry)
            for parameter in members.get(key[:-1], ()):
                settings_by_parameter[str(parameter)].add(str(key[-1]))
            if key[:-1] == optimizer_key and str(key[-1]).startswith(FLATTENED[1]):
                _, parameter, setting = split_flattened_key(str(key[-1]))
                settings_by_parameter[parameter].add(setting)
        return {parameter: frozenset(settings) for parameter, settings in settings_by_parameter.items()}

    def has_setting(self, optimizer_key: KeyPath, names: frozenset[str]) -> bool:
        """Return whether a group of the optimizer at a key path has one of these settings."""
        at = len(optimizer_key)
        keys = (key for key in map(self.layout.key, self.layout.names) if len(key) > at and key[:at] == optimizer_key)
        return any(str(key[-1]).rpartition(".")[2] in names and _GROUPS in str(key[at]) for key in keys)


def without_wrappers(name: str) -> str:
    """Return a name without wrapper prefixes, including a leading prefix of DDP."""
    return without_common_ddp_prefix({"": without_prefixes_except_ddp(name)})[""]


class Certainty(IntEnum):
    """How certain it is that an inconsistency is a fault."""

    NOTE = 0  # not a fault, but matters for some uses of the checkpoint
    LIKELY = 1  # loaders fail or miss entries, unless the model differs from what the checkpoint shows
    CERTAIN = 2  # no model and optimizer can have these entries


_NOTE, _LIKELY, _CERTAIN = Certainty
_PREFIX_OF = "names have the prefix `{prefix}` (added by {whose})"
_NO_STATES = "a load by the weights' names finds no states"
_LOST_SETTINGS = "torch's `set_optimizer_state_dict` loses its settings, and the next step fails with a KeyError"
_TRAIN_MODE = "expected `train_mode` False in a schedule-free optimizer, found True"
_NO_AVERAGE = "{averaged} of {total} weights are those for training, not the averaged weights for evaluation"
_WORDS: Mapping[str, tuple[Certainty, str]] = {
    "state_shape": (_CERTAIN, "expected shape {expected} of its parameter, found {found}"),
    "state_size": (_CERTAIN, "expected the shape of a parameter, as {others} other states have, found {found}"),
    "foreign_states": (
        _LIKELY,
        "expected states with the shapes of the weights, found other shapes for {unfit} of {total} parameters",
    ),
    "state_kinds": (_CERTAIN, "expected the states {expected} of this parameter, found only {found}"),
    "prefixed_state": (
        _LIKELY,
        f"the optimizer's names have the prefix `{{prefix}}`, and the weights' names do not: {_NO_STATES}",
    ),
    "prefixed_weight": (
        _LIKELY,
        f"the weights' names have the prefix `{{prefix}}`, and the optimizer's names do not: {_NO_STATES}",
    ),
    "unknown_parameter": (_LIKELY, "no weight has this name; {unknown} of the optimizer's {total} names are unknown"),
    "listed_twice": (_LIKELY, "the optimizer's groups list this parameter {times} times"),
    "unlisted_state": (_LIKELY, "the optimizer has a state for this parameter, but no group contains the parameter"),
    "wrapped_state": (_LIKELY, f"the optimizer's {_PREFIX_OF}, and the weights' names do not: {_NO_STATES}"),
    "wrapped_weight": (_LIKELY, f"the weights' {_PREFIX_OF}, and the optimizer's names do not: {_NO_STATES}"),
    "empty_group": (_LIKELY, f"group {{number}} is without parameters: {_LOST_SETTINGS}"),
    "empty_weight": (_CERTAIN, "expected elements as in the other weights, found shape {found}"),
    "empty_tensor": (_LIKELY, "expected elements as in the other weights, found shape {found}"),
    "layer_gap": (_LIKELY, "expected {expected} numbered modules from 0, found no tensors for {missing}"),
    "layer_lacks": (_LIKELY, "expected the tensor as in the other {others} layers, not found"),
    "layer_differs": (_LIKELY, "expected {expected} as in the other {others} layers, found {found}"),
    "bias": (_LIKELY, "expected {expected} elements, one for each row of its weight, found {found}"),
    "experts": (_LIKELY, "expected {expected} experts as `{other}` has, found {found}"),
    "router": (_LIKELY, "expected {expected} rows, one for each expert, found {found}"),
    "head": (_NOTE, "expected {expected} rows as in `{embedding}`, found {found}; fine if some tokens are input only"),
    "other_step": (
        _LIKELY,
        "expected step {taken} (`global_steps`, without skipped ones), found another: two saves, or a new optimizer",
    ),
    "training_point": (_NOTE, f"{_TRAIN_MODE}: {_NO_AVERAGE}; call `optimizer.eval()` before the save"),
}


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """A contradiction in a checkpoint: `code` is the kind of contradiction, `data` has its names and numbers.

    `tensor` is the entry at fault, with `*` in place of numbers if `names` lists several entries. It is None if no
    single entry is at fault.
    """

    code: str
    tensor: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def certainty(self) -> Certainty:
        return _WORDS[self.code][0]

    @property
    def message(self) -> str:
        return _WORDS[self.code][1].format(**self.data)

    def to_error(self, path: Path) -> Mismatch:
        return Mismatch(f"{self.message}{and_more(len(self.names) - 1)}", path=path, tensor=self.tensor)

    @property
    def message_with_tensor(self) -> str:
        """Return the message with the tensor's name and the number of further entries."""
        more = and_more(len(self.names) - 1)
        return f"`{self.tensor}`{more}: {self.message}" if self.tensor else self.message
