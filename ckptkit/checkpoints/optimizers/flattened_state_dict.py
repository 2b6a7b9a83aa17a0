"""Rebuild the parameter groups of an optimizer that torch saved in flattened form.

Source: `_flatten_optim_state_dict` in torch/distributed/checkpoint/state_dict.py (`flatten_optimizer_state_dict=True`).
It writes `param_groups.<name>.lr` for each parameter, group by group, and drops the lists of the groups. Parameters
with the same settings were in one group, or in groups that cannot be distinguished any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats.archives.non_tensor_entries import load_value, with_new_value
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, KeyPath, Layout, StoredTensor
from ckptkit.models.names.rename_parameters import FLATTENED, split_flattened_key

_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class FlattenedOptimizer:
    """A flattened optimizer at a key path: the entries of each parameter's settings and states, in file order."""

    above: KeyPath
    settings: Mapping[str, Mapping[str, str]]
    states: Mapping[str, Mapping[str, str]]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.above)) or "optimizer"

    def group_parameters(self, layout: Layout, order: Sequence[str]) -> list[list[str]]:
        """Return the names in each group, given the `order` of the parameters: equal settings form a group.

        Raises `Unsupported` for a setting that is a tensor.
        """
        by_values: dict[bytes, list[str]] = {}
        for parameter in order:
            entries = self.settings[parameter]
            tensor = next((name for name in entries.values() if name not in layout.blobs), None)
            if tensor is not None:
                message = "a setting of the optimizer is a tensor, so ckptkit does not know which parameters share it"
                raise Unsupported(message, path=layout.path, tensor=tensor)
            values = {what: load_value(layout.root, layout.blobs[name]) for what, name in sorted(entries.items())}
            by_values.setdefault(dump(values), []).append(parameter)
        return list(by_values.values())


def find_flattened_optimizers(layout: Layout) -> list[FlattenedOptimizer]:
    """Return the optimizers in a layout whose settings torch has flattened."""
    found: dict[KeyPath, dict[str, dict[str, dict[str, str]]]] = {}
    for name in layout.names:
        *above, last = layout.key(name)
        if isinstance(last, str) and last.startswith(FLATTENED):
            kind, parameter, what = split_flattened_key(last)
            entries = found.setdefault(tuple(above), {_GROUPS: {}, _STATE: {}})
            entries[kind].setdefault(parameter, {})[what] = name
    return [FlattenedOptimizer(above, one[_GROUPS], one[_STATE]) for above, one in found.items() if one[_GROUPS]]


def with_nested_optimizer(layout: Layout, optimizer: FlattenedOptimizer, order: Sequence[str]) -> Layout:
    """Return the layout with an optimizer in torch's nested form; its groups list their parameters in this `order`.

    Raises `Mismatch` for an order that does not list exactly the optimizer's parameters.
    """
    other = next(iter(set(order) ^ optimizer.settings.keys()), None)
    if other is not None or len(order) != len(optimizer.settings):
        message = f"expected the {len(optimizer.settings)} parameters of `{optimizer.name}`, found {len(order)}"
        where = "" if other is None else f": only the {'order' if other in order else 'optimizer'} has `{other}`"
        raise Mismatch(f"{message}{where}", path=layout.path)
    dropped = {name for entries in optimizer.settings.values() for name in entries.values()}
    tensors: dict[str, StoredTensor] = {}
    blobs: dict[str, Blob] = {}
    keys: dict[str, KeyPath] = {}
    for name in layout.names:
        if name in dropped:
            continue
        key = layout.key(name)
        if key[:-1] == optimizer.above and str(key[-1]).startswith(FLATTENED):
            _, parameter, what = split_flattened_key(str(key[-1]), optimizer.settings)
            key = (*optimizer.above, _STATE, parameter, *what.split("."))
        new = ".".join(map(str, key)) if key != layout.key(name) else name
        keys[new] = key
        if name in layout.tensors:
            tensors[new] = layout.tensors[name]
        else:
            blobs[new] = layout.blobs[name]
    for i, names in enumerate(optimizer.group_parameters(layout, order)):
        settings = {what: layout.blobs[name] for what, name in optimizer.settings[names[0]].items()}
        settings["params"] = with_new_value(next(iter(settings.values())), names)
        for what, blob in settings.items():
            key = (*optimizer.above, _GROUPS, i, what)
            keys[".".join(map(str, key))], blobs[".".join(map(str, key))] = key, blob
    return replace(layout, tensors=tensors, blobs=blobs, keys=keys, twins={})
