"""Rename a model's parameters wherever they occur in a training checkpoint.

A parameter's name is the last step of the way to it; below `state`, the step before the name of a moment, or after it,
unless the optimizer only counts its parameters. Optimizers flattened by torch have both in one step,
`state.<name>.exp_avg`. The groups of an optimizer list them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from ckptkit.formats.archives.values import load_value, with_value
from ckptkit.layout import Blob, KeyPath, Layout, edits

NewName = Callable[[str], str]
FLATTENED = ("state.", "param_groups.")


def rename_parameters(layout: Layout, weights: frozenset[str], new_name: NewName) -> tuple[Layout, dict[str, str]]:
    """Return the checkpoint with its parameters renamed, and by old name the new one of each entry that has one.

    `weights` are the entries that are the model's own.
    """
    own = {layout.key(name)[-1] for name in weights}
    keys = {name: rename_in(layout.key(name), new_name, name in weights, own) for name in layout.names}
    changed = {name: new for name, key in keys.items() if (new := ".".join(map(str, key))) != name}
    if not changed:
        return layout, {}
    lists = {name: blob for name, blob in layout.blobs.items() if is_list_of_parameters(layout.key(name))}
    blobs = {**layout.blobs, **{name: rename_list(layout, blob, new_name) for name, blob in lists.items()}}
    return edits.rekey(replace(layout, blobs=blobs), keys), changed


def parameters_in(layout: Layout, weights: Iterable[str]) -> set[str]:
    """Return the names that `rename_parameters` replaces: those of the `weights`, and those in optimizers."""
    own = {layout.key(name)[-1] for name in weights}
    ways = (way_in_optimizer(layout.key(name)) for name in layout.names)
    return {name for name in (*own, *(way[1] for way in ways if way)) if isinstance(name, str)}


def rename_in(key: KeyPath, new_name: NewName, is_weight: bool, own: Container[object] = ()) -> KeyPath:
    """Return a key path with the parameter's name in it replaced; `own` are the names of all parameters."""
    last = key[-1]
    if is_weight:
        return (*key[:-1], new_name(last)) if isinstance(last, str) else key
    if isinstance(last, str) and last.startswith(FLATTENED):
        kind, _, rest = last.partition(".")
        name, _, what = rest.rpartition(".")
        return (*key[:-1], f"{kind}.{new_name(name)}.{what}")
    if len(key) > 2 and key[-3] == "state" and isinstance(key[-2], str) and not key[-2].isdecimal():
        if isinstance(last, str) and last in own:
            return (*key[:-1], new_name(last))
        return (*key[:-2], new_name(key[-2]), last)
    return key


def way_in_optimizer(key: KeyPath) -> KeyPath | None:
    """Return where an entry lies in an optimizer's state dict as torch nests it; None for what is of no optimizer.

    Groups flattened by torch are given by the name of each parameter, not by number.
    """
    last = key[-1]
    if isinstance(last, str) and last.startswith(FLATTENED):
        kind, _, rest = last.partition(".")
        name, _, what = rest.rpartition(".")
        return (kind, name, what)
    if len(key) > 2 and key[-3] in ("state", "param_groups"):
        return key[-3:]
    return None


def is_list_of_parameters(key: KeyPath) -> bool:
    """Return True for the way to the parameters of an optimizer's group."""
    return len(key) > 2 and key[-3] == "param_groups" and key[-1] == "params"


def rename_list(layout: Layout, blob: Blob, new_name: NewName) -> Blob:
    """Return a list of parameters under their new names; of numbers, as it is."""
    value = load_value(layout.root, blob)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return blob
    return with_value(blob, [new_name(name) for name in value])
