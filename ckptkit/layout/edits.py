"""Edit layouts, by arithmetic on names and specs. No bytes move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ckptkit.errors import Mismatch
from ckptkit.layout import KeyPath, Layout, Spec, StoredTensor
from ckptkit.layout.dtypes import DType


def select(layout: Layout, keep: Callable[[str], bool]) -> Layout:
    """Return the tensors and blobs whose name `keep` accepts."""
    return replace(
        layout,
        tensors={name: tensor for name, tensor in layout.tensors.items() if keep(name)},
        blobs={name: blob for name, blob in layout.blobs.items() if keep(name)},
        twins={name: twin for name, twin in layout.twins.items() if keep(name)},
    )


def rename(layout: Layout, new_name: Callable[[str], str]) -> Layout:
    """Return the same tensors under other names. Raises `Mismatch` if two would get the same; blobs are left behind."""
    came_from: dict[str, str] = {}
    for name in layout.tensors:
        new = new_name(name)
        if new in came_from:
            raise clash(layout, came_from[new], name, new)
        came_from[new] = name
    tensors = {new: layout.tensors[old] for new, old in came_from.items()}
    return replace(layout, tensors=tensors, blobs={}, keys={}, twins={})


def rekey(layout: Layout, ways: Mapping[str, KeyPath]) -> Layout:
    """Return the same tensors and blobs, each by a new way through the nested dict.

    Raises `Mismatch` if two names become one, or one lies on the way to another.
    """
    came_from: dict[str, str] = {}
    keys: dict[str, KeyPath] = {}
    for name in layout.names:
        key = ways[name]
        new = ".".join(map(str, key))
        if new in came_from:
            raise clash(layout, came_from[new], name, new)
        came_from[new], keys[new] = name, key
    check_ways(layout, keys)
    return replace(
        layout,
        tensors={new: layout.tensors[old] for new, old in came_from.items() if old in layout.tensors},
        blobs={new: layout.blobs[old] for new, old in came_from.items() if old in layout.blobs},
        keys=keys,
        twins={new: layout.twins[old] for new, old in came_from.items() if old in layout.twins},
    )


def check_ways(layout: Layout, keys: Mapping[str, KeyPath]) -> None:
    """Raise `Mismatch` if an entry lies where others need a dict."""
    ends = {key: name for name, key in keys.items()}
    for name, key in keys.items():
        in_the_way = next((ends[key[:i]] for i in range(1, len(key)) if key[:i] in ends), None)
        if in_the_way is not None:
            message = f"expected a dict at `{in_the_way}`, found an entry"
            raise Mismatch(message, path=layout.root, tensor=name, hint="change --rename, or drop one")


def nest(layout: Layout, above: KeyPath) -> Layout:
    """Return the same tensors and blobs, all under one key of the nested dict."""
    return rekey(layout, {name: (*above, *layout.key(name)) for name in layout.names})


def take_twins(layout: Layout) -> Layout:
    """Return the tensors that have rounded copies as these are, and the others as they were."""
    return replace(layout, tensors={**layout.tensors, **layout.twins}, twins={})


def twins_as_rounded(layout: Layout) -> tuple[Layout, Layout]:
    """Return the tensors that have copies, in the dtypes of these, and the copies: they have to be the same."""
    copied = {name: layout.tensors[name] for name in layout.twins if name in layout.tensors}
    tensors = replace(layout, tensors=copied, blobs={}, twins={})
    copies = replace(tensors, tensors={name: layout.twins[name] for name in copied})
    return cast(tensors, lambda name, _: copies.tensors[name].spec.dtype), copies


def clash(layout: Layout, one: str, other: str, new: str) -> Mismatch:
    message = f"`{one}` and `{other}` would both get this name"
    return Mismatch(message, path=layout.root, tensor=new, hint="change --rename, or drop one with --exclude")


def cast(layout: Layout, wanted: Callable[[str, Spec], DType]) -> Layout:
    """Return the same tensors in the dtypes that `wanted` gives; chunks stay, and are converted when read."""
    tensors = {
        name: replace(tensor, spec=replace(tensor.spec, dtype=wanted(name, tensor.spec)))
        for name, tensor in layout.tensors.items()
    }
    return replace(layout, tensors=tensors)


def without_lost(layout: Layout) -> tuple[Layout, dict[str, StoredTensor]]:
    """Return the layout without its lost tensors, and the lost tensors."""
    lost = {name: t for name, t in layout.tensors.items() if t.is_lost}
    return select(layout, lambda name: name not in lost), lost
