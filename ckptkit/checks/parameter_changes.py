"""Measure which parameters changed most between two checkpoints of one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Self

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.component import Component, require_archives_of_one_save
from ckptkit.engine.compare import compare_computed, compare_layouts
from ckptkit.engine.distance import Distance
from ckptkit.errors import Mismatch
from ckptkit.formats import locate_all_chunks
from ckptkit.io.progress import Progress, make_progress_reporter
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.layout.renames import numbers_to_wildcards
from ckptkit.models.companions import find_model_config
from ckptkit.state.match_checkpoints import Side, with_model_names
from ckptkit.state.quantized.dequantize import dequantizing_recipe_of
from ckptkit.state.quantized.find import Quantized, find_quantized
from ckptkit.state.quantized.packed import dequantized_name
from ckptkit.summary import Summarized, first_lines_and_more
from ckptkit.words import command_line, count, per_cent

_FLOAT32 = DTYPES["float32"]


@dataclass(frozen=True, slots=True)
class ComparableModel:
    """A model as it is compared: `specs` of dequantized weights, and in `packed` the stored names of quantized ones."""

    layout: Layout
    quantized: Quantized | None
    specs: Mapping[str, Spec]
    packed: Mapping[str, str]

    @classmethod
    def of(cls, layout: Layout, component: Component) -> Self:
        """Find the weights of a model under the names that they are compared by.

        Raises `Mismatch` for scales that do not fit. Weights that cannot be dequantized stay as they are stored.
        """
        quantized = find_quantized(layout, find_model_config(component.path))
        if quantized is None or quantized.refusal is not None:
            return cls(layout, None, layout.specs, {})
        packed = {dequantized_name(name): name for name in quantized.weights}
        specs = {name: spec for name, spec in layout.specs.items() if name not in quantized.members}
        specs |= {name: Spec(_FLOAT32, quantized.weights[stored].shape) for name, stored in packed.items()}
        return cls(layout, quantized, specs, packed)

    def recipe_for(self, name: str, source_index: int) -> Recipe:
        """Return the recipe of a weight, with operands from the source of this index."""
        from ckptkit.engine.recipes import Taken  # deferred: imports numpy

        if self.quantized is None or name not in self.packed:
            return Taken(Operand(source_index, name, self.specs[name].dtype))
        return dequantizing_recipe_of(self.quantized, self.packed[name], source_index)

    def stored_layout_for(self, names: set[str]) -> Layout:
        """Return the stored tensors that these weights are computed from."""
        stored = {self.packed.get(name, name) for name in names}
        if self.quantized is not None:
            packed = [self.quantized.weights[self.packed[name]] for name in names & self.packed.keys()]
            stored |= {beside for weight in packed for beside in weight.beside}
        return replace(edits.select_entries(self.layout, stored.__contains__), blobs={}, twins={})


@dataclass(frozen=True, slots=True)
class Movement:
    """The change of a tensor, or of several `tensors` as if they were one; `peak` is the one that changed most."""

    name: str
    distance: Distance
    tensors: int
    peak: str

    @property
    def change(self) -> float:
        """Return ||b - a|| / ||a||."""
        return self.distance.rel_l2

    @property
    def equal(self) -> float:
        """Return the fraction of elements that are bit-equal; if the dtypes differ, that have the same value."""
        return self.distance.equal_fraction

    def merge(self, other: Movement) -> Movement:
        """Return both as one, under a name without the layer number. `other` must have changed less."""
        return Movement(
            numbers_to_wildcards(self.name),
            self.distance.merge(other.distance),
            self.tensors + other.tensors,
            self.peak,
        )


@dataclass(frozen=True, slots=True)
class Moved(Summarized):
    """The changes of a model's parameters from checkpoint `a` to `b`, largest first, under the model's own names."""

    a: Path
    b: Path
    tensors: tuple[Movement, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> Iterator[str]:
        whole, kinds = self.whole, self.by_kind
        how_far = f"change {whole.change:.3g}, {per_cent(whole.equal)} equal"
        yield f"{self.a} to {self.b}: all of {count(whole.tensors, 'tensor')} together: {how_far}"
        yield from first_lines_and_more((f"{kind.name}: change {kind.change:.3g}" for kind in kinds), len(kinds))

    @property
    def by_kind(self) -> tuple[Movement, ...]:
        """The changes, merged if only the layer number differs: `layers.*.mlp.up_proj.weight`."""
        kinds: dict[str, Movement] = {}
        for movement in self.tensors:
            kind = numbers_to_wildcards(movement.name)
            kinds[kind] = kinds[kind].merge(movement) if kind in kinds else movement
        return sort_by_change(kinds.values())

    @property
    def whole(self) -> Movement:
        """All changes as if they were one tensor."""
        return reduce(Movement.merge, self.tensors)


def moved(a: Source, b: Source, *, jobs: int | None = None, progress: Progress | None = None) -> Moved:
    """Measure how much each parameter changed from checkpoint `a` to `b`, or from the latest of the run `a`.

    Parameters that only one has, or in another shape, are left out and noted. Raises `Mismatch` if they share none, and
    any `CkptError` if one of them cannot be read or is damaged.
    """
    parts = [Checkpoint.open(source).model_component for source in (a, b)]
    one, two = (part.path for part in parts)
    for part in parts:
        require_archives_of_one_save(part.layout)
    sides = [with_model_names(Side(part.path, part.layout)) for part in parts]
    ours, theirs = (side.only_weights().layout if side.weights else side.layout for side in sides)
    models = [ComparableModel.of(side, part) for side, part in zip((ours, theirs), parts, strict=True)]
    before, after = (one.specs for one in models)
    shared = {
        name
        for name, spec in before.items()
        if name in after and spec.shape == after[name].shape and "float" == spec.dtype.kind == after[name].dtype.kind
    }
    if not shared:
        hint = "run `ckptkit diff` to see what both contain"
        raise Mismatch(f"expected a parameter of the same name and shape in {two}, found none", path=one, hint=hint)
    rest = len(before.keys() | after.keys()) - len(shared)
    notes = []
    if rest:
        notes.append(f"left out {count(rest, 'tensor')}: missing in {one} or {two}, of different shapes, or not floats")
    computed = {name for name in shared if any(name in one.packed for one in models)}
    for model in models:
        if model.quantized is not None and (packed := len(computed & model.packed.keys())):
            weights = f"{count(packed, 'quantized weight')} of {model.layout.root} ({model.quantized.method})"
            notes.append(f"compared by their values: {weights}")
    if cast := sum(before[name].dtype != after[name].dtype for name in shared - computed):
        notes.append(
            f"the dtypes of {count(cast, 'tensor')} differ, so `equal` compares their values; to compare in the dtypes "
            f"of {one}, run {command_line('delta', one, two, 'OUT', '--dry-run')}"
        )
    distances = measure_distances(models, shared - computed, computed, jobs, progress)
    movements = (Movement(name, distances.get(name, Distance()), 1, name) for name in shared)
    return Moved(one, two, sort_by_change(movements), tuple(notes))


def measure_distances(
    models: Sequence[ComparableModel], stored: set[str], computed: set[str], jobs: int | None, progress: Progress | None
) -> Mapping[str, Distance]:
    """Return the distances of tensors: some are compared as stored, the others are computed first."""
    (a, b), (c, d) = (
        [locate_all_chunks(side.stored_layout_for(names)) for side in models] for names in (stored, computed)
    )
    report = make_progress_reporter(progress, sum(layout.nbytes for layout in (a, b, c, d)))
    distances = dict(compare_layouts(a, b, measure_all=True, jobs=jobs, progress=report).distances)
    if not computed:
        return distances
    one, two = models
    sides = {
        name: ((one.recipe_for(name, 0), one.specs[name]), (two.recipe_for(name, 1), two.specs[name]))
        for name in sorted(computed)
    }
    return distances | compare_computed(c, d, sides, jobs=jobs, progress=report)


def sort_by_change(movements: Iterable[Movement]) -> tuple[Movement, ...]:
    return tuple(sorted(movements, key=lambda movement: (-movement.change, movement.name)))
