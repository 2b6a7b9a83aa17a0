"""Gather the tensors and entries of many files under one set of key paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.flatten import FlatState, Flattening
from ckptkit.formats.pickles.tensor_calls import is_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, KeyPath, StoredTensor
from ckptkit.plugins.deepspeed.auto_experts import LAYERS
from ckptkit.plugins.deepspeed.values import without_classes

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
