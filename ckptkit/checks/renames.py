"""Find tensors that two checkpoints have under different names, by a rule or by their contents."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from ckptkit.engine.compare import row_major_checksums
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import match_names_by_rule


def find_renames(a: Layout, b: Layout, *, jobs: int | None = None) -> dict[str, str]:
    """Return a map from names in `a` to names in `b` of equal tensors, for layouts without a common name.

    A rule is accepted by the shapes alone if it renames tensors that differ in more than their layer numbers. Other
    tensors are read: they must have the same elements, and be the only ones that do.
    """
    renames = match_names_by_rule(shapes_of_entries(a), shapes_of_entries(b))
    rest_a = edits.select_entries(a, lambda name: name not in renames)
    rest_b = edits.select_entries(b, lambda name: name not in renames.values())
    return renames | find_renames_by_content(rest_a, rest_b, jobs)


def shapes_of_entries(layout: Layout) -> dict[str, Shape | None]:
    """Return the shape of every tensor, and None for other entries."""
    return {name: spec.shape for name, spec in layout.specs.items()} | dict.fromkeys(layout.blobs)


def find_renames_by_content(a: Layout, b: Layout, jobs: int | None) -> dict[str, str]:
    """Return the renames of tensors with more than one element whose contents occur once in each layout."""
    shared = {spec for spec in a.specs.values() if spec.numel > 1} & set(b.specs.values())
    ours, theirs = names_by_spec_and_checksum(a, shared, jobs), names_by_spec_and_checksum(b, shared, jobs)
    return {
        ours[content][0]: theirs[content][0]
        for content in ours
        if content in theirs and len(ours[content]) == len(theirs[content]) == 1
    }


def names_by_spec_and_checksum(
    layout: Layout, specs: AbstractSet[Spec], jobs: int | None
) -> dict[tuple[Spec, int], list[str]]:
    """Return the names of the tensors with one of these specs, by spec and CRC-32."""
    owners: dict[tuple[Spec, int], list[str]] = {}
    tensors = {name: tensor for name, tensor in layout.tensors.items() if tensor.spec in specs}
    for name, crc in row_major_checksums(
        locate_all_chunks(replace(layout, tensors=tensors, blobs={})), jobs=jobs
    ).items():
        owners.setdefault((tensors[name].spec, crc), []).append(name)
    return owners
