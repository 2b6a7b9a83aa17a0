"""Compare the entries of two checkpoints that are not tensors. Runs no code from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptkit.engine.compare import compare
from ckptkit.errors import Unsupported
from ckptkit.formats import locate
from ckptkit.formats.archives.values import load_value
from ckptkit.formats.pickles.inert_pickle import SCALARS, PersistentId, walk
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import whole
from ckptkit.layout.dtypes import DTYPES

Scalar = str | int | float | bytes | bool | None


def differing_entries(a: Layout, b: Layout) -> tuple[dict[str, tuple[Scalar, Scalar] | None], list[str]]:
    """Return the entries of two layouts with the same names that differ, with both values where these are scalars.

    Return remarks, too, on entries that cannot be compared.
    """
    remarks = []
    a, b = (locate(replace(layout, tensors={})) for layout in (a, b))
    unlike = a.blobs.keys() - same_bytes(a, b)
    found: dict[str, tuple[Scalar, Scalar] | None] = {}
    for name in sorted(unlike):
        try:
            one, two = (load_value(layout.root, layout.blobs[name]) for layout in (a, b))
            if not is_same(one, two):
                found[name] = (one, two) if isinstance(one, SCALARS) and isinstance(two, SCALARS) else None
        except Unsupported as error:
            remarks.append(f"entry `{name}` was not compared: {error.message}")
    return found, remarks


def same_bytes(a: Layout, b: Layout) -> set[str]:
    """Return the entries that have bytes to themselves, and the same in both."""
    names = {
        name
        for name, blob in a.blobs.items()
        if blob.content is None and b.blobs[name].content is None and 0 < blob.length == b.blobs[name].length
    }
    different = compare(*(as_bytes(layout, names) for layout in (a, b))).different
    return names.difference(different)


def as_bytes(layout: Layout, names: set[str]) -> Layout:
    tensors = {name: tensor_of(layout.blobs[name]) for name in names}
    return replace(layout, tensors=tensors, blobs={}, keys={})


def tensor_of(blob: Blob) -> StoredTensor:
    """Return the bytes of an entry as a tensor."""
    box, dtype = whole((blob.length,)), DTYPES["uint8"]
    chunk = Chunk(box, blob.path, blob.offset, blob.length, dtype, crc32=blob.crc32)
    return StoredTensor(Spec(dtype, box.size), (chunk,))


def is_same(one: Any, two: Any) -> bool:
    """Return whether entries whose bytes differ hold the same value all the same; not if there are tensors in it."""
    has_tensors = any(isinstance(part, PersistentId) for value in (one, two) for part in walk(value))
    return not has_tensors and dump(one) == dump(two)
