"""List the differences between two checkpoints, the most important first: tensors, then non-tensor entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptkit.engine.compare import compare_layouts
from ckptkit.engine.distance import Distance
from ckptkit.errors import Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.formats.pickles.inert_pickle import SCALARS, PersistentId, walk_members
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.renames import numbers_to_wildcards
from ckptkit.models.config_differences import ConfigDifference, describe_differences
from ckptkit.summary import Summarized, first_lines_and_more
from ckptkit.words import count, format_bytes

Scalar = str | int | float | bytes | bool | None


def differing_non_tensor_entries(a: Layout, b: Layout) -> tuple[dict[str, tuple[Scalar, Scalar] | None], list[str]]:
    """Return the entries that differ, with both values if these are scalars, and remarks on entries not compared."""
    remarks = []
    a, b = (locate_all_chunks(replace(layout, tensors={})) for layout in (a, b))
    # entries that are stored as byte ranges of their own are compared by their bytes first, as uint8 tensors
    names = {
        name
        for name, blob in a.blobs.items()
        if blob.content is None and b.blobs[name].content is None and 0 < blob.length == b.blobs[name].length
    }
    as_tensors, dtype = [], DTYPES["uint8"]
    for layout in (a, b):
        tensors = {}
        for name in names:
            blob = layout.blobs[name]
            box = full_box((blob.length,))
            chunk = Chunk(box, blob.path, blob.offset, blob.length, dtype, crc32=blob.crc32)
            tensors[name] = StoredTensor(Spec(dtype, box.size), (chunk,))
        as_tensors.append(replace(layout, tensors=tensors, blobs={}, keys={}))
    equal = names.difference(compare_layouts(*as_tensors).differing_names)
    differing: dict[str, tuple[Scalar, Scalar] | None] = {}
    for name in sorted(a.blobs.keys() - equal):
        try:
            one, two = (load_value(layout.root, layout.blobs[name]) for layout in (a, b))
            has_tensors = any(isinstance(part, PersistentId) for value in (one, two) for part in walk_members(value))
            if has_tensors or dump(one) != dump(two):  # tensors are not read, and count as different
                differing[name] = (one, two) if isinstance(one, SCALARS) and isinstance(two, SCALARS) else None
        except Unsupported as error:
            remarks.append(f"entry `{name}` was not compared: {error.message}")
    return differing, remarks


Reason = Literal["shape", "dtype", "values", "entry"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or non-tensor entry that both have and that differs.

    `a` and `b` are the specs of a tensor; it has a `distance` if its elements could be compared. A scalar entry has
    both `values`.
    """

    name: str
    reason: Reason
    a: Spec | None = None
    b: Spec | None = None
    distance: Distance | None = None
    values: tuple[Scalar, Scalar] | None = None
    is_weight: bool = False

    @property
    def sort_key(self) -> tuple[int, bool, float, str]:
        """A sort key, most important first: other shapes, NaN, the model's weights, the largest distance."""
        kind = 0 if self.reason == "shape" else 3 if self.distance is None else 1 if self.distance.strange else 2
        return kind, not self.is_weight, -self.distance.rel_l2 if self.distance else 0.0, self.name


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences of `count` tensors whose names differ only in the layer number, merged as if one tensor."""

    difference: Difference
    count: int

    def merge(self, other: Difference) -> Kind:
        """Return the kind with one more difference, without the index of the first different element."""
        distance = self.difference.distance
        if distance is not None and other.distance is not None:
            distance = replace(distance.merge(other.distance), first=None)
        return Kind(replace(self.difference, name=numbers_to_wildcards(other.name), distance=distance), self.count + 1)


@dataclass(frozen=True, slots=True)
class Diff(Summarized):
    """The differences between `a` and `b`.

    `tensors` and `nbytes` count the compared tensors, `entries` the other compared entries. `different` is sorted by
    importance. `renamed` maps names in `a` to names in `b`; tensors under two names were
    compared. `checked_bytes` were verified against a CRC-32. `configs` are the keys of config.json that make the two
    models compute differently. A `Diff` has no truth value: use `is_equal`.
    """

    a: Path
    b: Path
    tensors: int = 0
    nbytes: int = 0
    checked_bytes: int = 0
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    different: tuple[Difference, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    entries: int = 0
    configs: tuple[ConfigDifference, ...] = ()

    @property
    def by_kind(self) -> tuple[Kind, ...]:
        """Return the differences, merged if they are the same in every layer: `layers.*.mlp.up_proj.weight`.

        Tensors with NaN stay separate.
        """
        kinds: dict[tuple[object, ...], Kind] = {}
        for difference in self.different:
            has_nan = difference.distance is not None and difference.distance.strange > 0
            key = (
                difference.name if has_nan else numbers_to_wildcards(difference.name),
                difference.reason,
                difference.a,
                difference.b,
                difference.values,
            )
            kinds[key] = kinds[key].merge(difference) if key in kinds else Kind(difference, 1)
        return tuple(sorted(kinds.values(), key=lambda kind: kind.difference.sort_key))

    def __bool__(self) -> bool:
        raise TypeError("a Diff is neither true nor false, which could mean equal or different; use `is_equal`")

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs, neither names nor the computation that config.json describes."""
        return self.has_same_entries and not self.configs

    @property
    def has_same_entries(self) -> bool:
        """Return whether all tensors and other entries are equal, under the same names."""
        return not (self.only_in_a or self.only_in_b or self.different or self.renamed)

    def summary(self) -> Iterator[str]:
        yield f"{self.a} and {self.b}: {conclusion_line(self)}"
        yield from first_lines_and_more((f"{one.name}: {one.reason}" for one in self.different), len(self.different))

    def merge(self, other: Diff) -> Diff:
        """Return the combined result for two components of the same checkpoints."""
        return Diff(
            self.a,
            self.b,
            self.tensors + other.tensors,
            self.nbytes + other.nbytes,
            self.checked_bytes + other.checked_bytes,
            self.only_in_a + other.only_in_a,
            self.only_in_b + other.only_in_b,
            tuple(sorted(self.different + other.different, key=lambda found: found.sort_key)),
            {**self.renamed, **other.renamed},
            tuple(dict.fromkeys(self.notes + other.notes)),
            self.entries + other.entries,
            self.configs or other.configs,
        )


def conclusion_line(diff: Diff) -> str:
    """Return the result in one line."""
    amount = f"{count(diff.tensors, 'tensor')}, {format_bytes(diff.nbytes)}"
    if not diff.tensors:
        amount = f"{count(diff.entries, 'entry')}, no tensor"
    if diff.is_equal:
        return f"the same: {amount}"
    configs = f"the configs differ in {describe_differences(diff.configs, 'B')}" if diff.configs else ""
    if diff.has_same_entries:
        return f"not the same model: the tensors are equal, but {configs}; compared: {amount}"
    weights = sum(difference.is_weight for difference in diff.different)
    differ = "entry differs" if len(diff.different) == 1 else "entries differ"
    lines = [
        (len(diff.different), differ + (f" ({weights:,} of the model)" if weights else "")),
        (len(diff.only_in_a), "only in A"),
        (len(diff.only_in_b), "only in B"),
        (len(diff.renamed), "renamed"),
    ]
    text = ", ".join(f"{number:,} {what}" for number, what in lines if number)
    only_names = diff.renamed and not (diff.different or diff.only_in_a or diff.only_in_b)
    text = f"{text}{' but equal' if only_names else ''}{f'; {configs}' if configs else ''}"
    return f"not the same: {text}; compared: {amount}"
