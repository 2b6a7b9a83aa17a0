"""Edits: from one layout to another, by arithmetic on names and specs. No bytes move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptkit.dtypes import DType
from ckptkit.errors import Mismatch
from ckptkit.layout import Layout, Spec


def select(layout: Layout, keep: Callable[[str], bool]) -> Layout:
    """The tensors and blobs whose name `keep` accepts."""
    return replace(
        layout,
        tensors={name: tensor for name, tensor in layout.tensors.items() if keep(name)},
        blobs={name: blob for name, blob in layout.blobs.items() if keep(name)},
    )


def rename(layout: Layout, new_name: Callable[[str], str]) -> Layout:
    """The same tensors under other names. Raises `Mismatch` if two would get the same; blobs are left behind."""
    came_from: dict[str, str] = {}
    for name in layout.tensors:
        new = new_name(name)
        if new in came_from:
            message = f"`{came_from[new]}` and `{name}` would both be called this"
            raise Mismatch(
                message, path=layout.root, tensor=new, hint="change --rename, or leave one out with --exclude"
            )
        came_from[new] = name
    tensors = {new: layout.tensors[old] for new, old in came_from.items()}
    return replace(layout, tensors=tensors, blobs={}, keys={})


def cast(layout: Layout, wanted: Callable[[str, Spec], DType]) -> Layout:
    """The same tensors, in the dtypes that `wanted` gives; chunks stay what they are and are converted when read."""
    tensors = {
        name: replace(tensor, spec=replace(tensor.spec, dtype=wanted(name, tensor.spec)))
        for name, tensor in layout.tensors.items()
    }
    return replace(layout, tensors=tensors)
