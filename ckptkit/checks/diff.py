"""Compare two checkpoints of any formats, world sizes and dtypes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from operator import ne
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.component import require_archives_of_one_save
from ckptkit.checkpoints.find_components import describe_not_copied
from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.checkpoints.optimizers.keys import IDS, NAMES, find_parameter_key_kind
from ckptkit.checkpoints.optimizers.parameter_names import ORDER, read_optimizer_order
from ckptkit.checks.differences import Diff, Difference, Reason, differing_non_tensor_entries
from ckptkit.engine.compare import Comparison, compare_layouts, row_major_checksums
from ckptkit.engine.distance import Tolerance
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported, Usage
from ckptkit.formats import locate_all_chunks
from ckptkit.io.progress import Progress, make_progress_reporter
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import match_names_by_rule
from ckptkit.models.companions import CONFIG
from ckptkit.state.match_checkpoints import (
    Side,
    pair_components,
    rename_parameters_in_sides,
    with_comparable_names,
    with_hub_names_on_both,
)
from ckptkit.state.names import NameOptions
from ckptkit.state.selection import Edits
from ckptkit.words import count

_ON_ENTRIES = "`ckptkit diff` compares entries that are not tensors"


def diff(
    a: Source,
    b: Source,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    allow_cast: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_unmatched: bool = False,
    map: str | Path | None = None,  # noqa: A002 - called as the option
    rename: str | Sequence[str] = (),
    base: str | Path | None = None,
    optimizer_order: str | Path | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare checkpoint `a` with `b`, or the latest of the runs at `a` and `b`: names, shapes, dtypes and values.

    Elements of the same dtype are equal if all bits are. With `rtol` or `atol`, or if dtypes differ, they are equal if
    `|a - b| <= atol + rtol * |b|`; NaN equals NaN. Another dtype is a difference, unless you pass `allow_cast`: then
    the wider of two floats is first converted to the narrower. `include` and `exclude` are globs of names; a glob that
    matches nothing is an error unless you pass `allow_unmatched`. If only one checkpoint has an optimizer, only the
    models are compared.

    The Hub's names are matched with those of another family if a config.json describes the translation: the one of
    either checkpoint, or of `base`. `map` is a table with further names, of either checkpoint, and `rename` has rules
    `REGEX=>TEXT` for the parameters of `a`. If one optimizer has parameter indices and the other names,
    `optimizer_order` is as in `convert`. Raises a `CkptError` if a checkpoint cannot be read or is damaged.
    """
    asked = Edits(include, exclude, allow_unmatched=allow_unmatched)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    terms = CompareOptions(tolerance, allow_cast)
    one, two = Checkpoint.open(a), Checkpoint.open(b)
    for part in (*one.components, *two.components):
        require_archives_of_one_save(part.layout)
    order = None if optimizer_order is None else read_optimizer_order(str(optimizer_order))
    if order is not None and {find_parameter_key_kind(side.layout) for side in (one, two)} != {NAMES, IDS}:
        message = f"{ORDER}: expected numbers of parameters in one optimizer and names in the other"
        raise Usage(message, hint=f"drop {ORDER}")
    named = NameOptions.of(map, rename, base, allow_unmatched=allow_unmatched)
    found_parts, remarks = pair_components(one, two, order)
    renamed = rename_parameters_in_sides([ours for ours, _ in found_parts], named)
    pairs_of_parts = zip(renamed, (theirs for _, theirs in found_parts), strict=True)
    pairs = [with_comparable_names(*with_hub_names_on_both(one, two, pair, named)) for pair in pairs_of_parts]
    notes = [*remarks, *(remark for pair in pairs for side in pair for remark in side.remarks)]
    if tolerance is not None:
        notes.append(f"numbers count as equal within rtol {tolerance.rtol:g} and atol {tolerance.atol:g}")
    configs, compared_files = compare_configs(one, two)
    for side in (one, two):
        beside = [file for file in side.unread_files if file.name not in compared_files]
        notes += describe_not_copied(beside, f"not compared in {side.path}")
    if any(differ_in_quantization(*pair) for pair in pairs):
        notes.append("8-bit numbers were compared without their scales: `ckptkit stats A B` includes the scales")
    asked.check_globs([side.layout for pair in pairs for side in pair], one.path)
    if not any(side.layout.names for pair in pairs for side in pair):
        raise Usage(f"nothing to compare: this and {two.path} have no entries", path=one.path)
    result = Diff(one.path, two.path, notes=tuple(notes)).merge(configs)
    for pair in pairs:
        ours, theirs = (side.select(asked.is_selected) for side in pair)
        result = result.merge(diff_components(ours, theirs, terms, jobs, progress))
    return result


def compare_tensors_with_source(
    output: Checkpoint,
    source: Checkpoint,
    *,
    allow_cast: bool,
    named: NameOptions,
    jobs: int | None,
    progress: Progress | None,
) -> dict[Path, Diff]:
    """Compare the tensors of a conversion's output with its source, bit for bit. Returns a `Diff` for each component.

    With `allow_cast`, a source tensor of another dtype is first converted to its dtype in `output`, as the conversion
    did. `named` are the user's options about the names in the source. Non-tensor entries are not compared.
    """
    terms = CompareOptions(allow_cast=allow_cast, is_conversion=True)
    diffs: dict[Path, Diff] = {}
    pairs, shared = pair_components(output, source)
    renamed = rename_parameters_in_sides([theirs for _, theirs in pairs], named)
    for (ours_before, _), theirs_renamed in zip(pairs, renamed, strict=True):
        ours, theirs = with_comparable_names(
            *with_hub_names_on_both(output, source, (ours_before, theirs_renamed), named)
        )
        notes = [*shared, *ours.remarks, *theirs.remarks]
        if ours.layout.blobs or theirs.layout.blobs:
            notes.append("entries that are not tensors were not compared")
        differences = diff_components(ours.only_tensors(), theirs.only_tensors(), terms, jobs, progress)
        diffs[ours.path] = Diff(ours.path, theirs.path, notes=tuple(notes)).merge(differences)
    if not any(diff.tensors or diff.only_in_a or diff.only_in_b or diff.different for diff in diffs.values()):
        raise Usage(f"nothing to compare: this and {source.path} have no tensors", path=output.path, hint=_ON_ENTRIES)
    return diffs


def compare_configs(one: Checkpoint, two: Checkpoint) -> tuple[Diff, frozenset[str]]:
    """Return the facts that make two models compute differently, and notes on facts that were not compared.

    Also returns the names of the files that were compared.
    """
    result = Diff(one.path, two.path)
    try:
        ours, theirs = ModelFacts.of(one), ModelFacts.of(two)
    except (Corrupt, IOFailure, Unsafe) as error:
        return replace(result, notes=(f"{CONFIG} was not compared: {error.message}",)), frozenset()
    compared = ours.compare(theirs)
    return replace(
        result, configs=compared.differences, notes=compared.notes
    ), ours.fact_file_names & theirs.fact_file_names


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The conditions under which two tensors are equal: the tolerance, and whether dtypes may differ.

    If dtypes may differ, the wider of two floats is converted to the narrower. For a conversion, the second is
    converted to the dtype of the first, and names must match exactly.
    """

    tolerance: Tolerance | None = None
    allow_cast: bool = False
    is_conversion: bool = False


def diff_components(
    ours: Side, theirs: Side, terms: CompareOptions, jobs: int | None, progress: Progress | None
) -> Diff:
    """Compare one component with another."""
    renamed: dict[str, str] = {}
    if not terms.is_conversion:
        ours, theirs, renamed = rename_equal_tensors(ours, theirs, jobs)
    a, b = ours.layout, theirs.layout
    measured, notes = compare_values(a, b, terms, jobs, progress)
    distances = measured.distances
    different = []
    for name in (name for name in a.tensors if name in b.tensors):
        one, two, distance = a.tensors[name].spec, b.tensors[name].spec, distances.get(name)
        reason: Reason | None = "values" if distance is not None and distance.different else None
        if one.shape != two.shape:
            reason = "shape"
        elif one.dtype != two.dtype and not (terms.allow_cast and one.dtype.is_castable_to(two.dtype)):
            reason = "dtype"
        if reason is not None:
            different.append(Difference(name, reason, one, two, distance, is_weight=name in ours.weights))
    shared = a.blobs.keys() & b.blobs.keys()
    blobs = (edits.select_entries(replace(layout, tensors={}), shared.__contains__) for layout in (a, b))
    entries, uncompared = differing_non_tensor_entries(*blobs)
    different += [Difference(name, "entry", values=values) for name, values in entries.items()]
    compared = [spec for name, spec in a.specs.items() if has_comparable_values(name, a, b)]
    return Diff(
        a.root,
        b.root,
        len(compared),
        sum(spec.nbytes for spec in compared),
        measured.checked_bytes,
        tuple(sorted(set(a.names) - set(b.names))),
        tuple(sorted(set(b.names) - set(a.names))),
        tuple(different),
        renamed,
        (*notes, *uncompared),
        len(shared) - len(uncompared),
    )


def rename_equal_tensors(ours: Side, theirs: Side, jobs: int | None) -> tuple[Side, Side, dict[str, str]]:
    """Return both sides, ours with the names of equal tensors of theirs, and the renames. Weights are matched first."""
    before = ours.layout.names
    renames = find_renames(
        entries_only_in(ours, theirs, ours.weights), entries_only_in(theirs, ours, theirs.weights), jobs=jobs
    )
    if renames:
        ours = ours.with_renamed_parameters(lambda name: renames.get(name, name))
    others = find_renames(entries_only_in(ours, theirs), entries_only_in(theirs, ours), jobs=jobs)
    if others:
        keys = {name: (others.get(name, name),) for name in ours.layout.names}
        ours = replace(ours, layout=edits.with_new_key_paths(ours.layout, keys))
    return ours, theirs, {old: new for old, new in zip(before, ours.layout.names, strict=True) if old != new}


def differ_in_quantization(one: Side, two: Side) -> bool:
    """Return whether a tensor is a plain float on one side and a float of 8 bits or fewer on the other."""
    specs = two.layout.specs
    pairs = ((spec.dtype, specs[name].dtype) for name, spec in one.layout.specs.items() if name in specs)
    return any({a.kind, b.kind} == {"float", "small_float"} for a, b in pairs)


def entries_only_in(side: Side, other: Side, among: AbstractSet[str] | None = None) -> Layout:
    """Return the entries of a side that the other side lacks; `among` restricts the names."""
    names = set(side.layout.names) - set(other.layout.names)
    return edits.select_entries(side.layout, (names if among is None else names & among).__contains__)


def compare_values(
    a: Layout, b: Layout, terms: CompareOptions, jobs: int | None, progress: Progress | None
) -> tuple[Comparison, list[str]]:
    """Compare the elements of the tensors that both have in the same shape. Also returns remarks on casts.

    A tensor is not converted if one of its finite elements would become infinite.
    """
    names = {name for name in a.tensors if has_comparable_values(name, a, b)}
    a, b = (replace(edits.select_entries(layout, names.__contains__), blobs={}) for layout in (a, b))
    unconverted: dict[str, str] = {}
    while True:
        pair = cast_to_common_dtypes(a, b, terms, unconverted) if terms.allow_cast else (a, b)
        ours, theirs = map(locate_all_chunks, pair)
        report = make_progress_reporter(progress, ours.nbytes + theirs.nbytes)
        try:
            compared = compare_layouts(ours, theirs, tolerance=terms.tolerance, jobs=jobs, progress=report)
        except Unsupported as error:  # from a conversion
            if error.tensor is None or not terms.allow_cast or error.tensor in unconverted:
                raise
            unconverted[error.tensor] = f"`{error.tensor}` was not converted to be compared: {error.message}"
            continue
        before, after = ((*one.specs.values(), *two.specs.values()) for one, two in ((a, b), (ours, theirs)))
        converted = sum(map(ne, before, after))
        remarks = [f"{count(converted, 'tensor', 'was')} converted to be compared"] if converted else []
        return compared, [*remarks, *unconverted.values()]


def cast_to_common_dtypes(a: Layout, b: Layout, terms: CompareOptions, kept: Container[str]) -> tuple[Layout, Layout]:
    """Return both layouts with the same dtype for each tensor that is not `kept`, where it can be cast."""
    specs_of_a, specs_of_b = (
        {name: spec for name, spec in layout.specs.items() if name not in kept} for layout in (a, b)
    )
    if terms.is_conversion:
        return a, edits.cast_to_specs(b, specs_of_a)
    return cast_to_narrower(a, specs_of_b), cast_to_narrower(b, specs_of_a)


def has_comparable_values(name: str, a: Layout, b: Layout) -> bool:
    """Return whether both have a tensor of this name and shape, in dtypes that can be compared."""
    if name not in a.tensors or name not in b.tensors:
        return False
    one, two = a.tensors[name].spec, b.tensors[name].spec
    return one.shape == two.shape and one.dtype.is_comparable_with(two.dtype)


def cast_to_narrower(layout: Layout, other_specs: Mapping[str, Spec]) -> Layout:
    specs = layout.specs
    narrower = {name: spec for name, spec in other_specs.items() if spec.dtype.itemsize < specs[name].dtype.itemsize}
    return edits.cast_to_specs(layout, narrower)


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
