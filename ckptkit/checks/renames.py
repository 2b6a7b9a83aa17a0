"""Find tensors that two checkpoints have under different names, by a rule or by their contents."""

from __future__ import annotations

from dataclasses import replace

from ckptkit.engine.compare import row_major_checksums
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import match_names_by_rule


def find_renames(a: Layout, b: Layout, *, jobs: int | None = None) -> dict[str, str]:
    """Return a map from names in `a` to names in `b` of equal tensors, for layouts without a common name.

    A rule is accepted by the shapes alone if it renames tensors that differ in more than their layer numbers. Other
    tensors are read: they must have more than one element, the same elements, and be the only ones that do.
    """
    renames = match_names_by_rule(shapes_of_entries(a), shapes_of_entries(b))
    rest_a = edits.select_entries(a, lambda name: name not in renames)
    rest_b = edits.select_entries(b, lambda name: name not in renames.values())
    shared = {spec for spec in rest_a.specs.values() if spec.numel > 1} & set(rest_b.specs.values())
    by_content: list[dict[tuple[Spec, int], list[str]]] = []  # names by spec and CRC-32
    for rest in (rest_a, rest_b):
        tensors = {name: tensor for name, tensor in rest.tensors.items() if tensor.spec in shared}
        located = locate_all_chunks(replace(rest, tensors=tensors, blobs={}))
        owners: dict[tuple[Spec, int], list[str]] = {}
        for name, crc in row_major_checksums(located, jobs=jobs).items():
            owners.setdefault((tensors[name].spec, crc), []).append(name)
        by_content.append(owners)
    ours, theirs = by_content
    return renames | {
        ours[content][0]: theirs[content][0]
        for content in ours
        if content in theirs and len(ours[content]) == len(theirs[content]) == 1
    }


def shapes_of_entries(layout: Layout) -> dict[str, Shape | None]:
    """Return the shape of every tensor, and None for other entries."""
    return {name: spec.shape for name, spec in layout.specs.items()} | dict.fromkeys(layout.blobs)
