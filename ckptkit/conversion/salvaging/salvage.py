"""Salvage the source of a conversion: repair it before planning the output, and account for lost tensors after it.

Lost tensors may be filled from another checkpoint: an earlier step, or the model that the training began with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.checkpoints.salvage_account import (
    LIMIT,
    NAME,
    Account,
    Filled,
    Lost,
    SalvagedWeights,
    describe_account,
    read_account,
)
from ckptkit.conversion.salvaging.copies import (
    Faults,
    can_replace,
    records_of_filled_tensors,
    records_of_lost_tensors,
    with_absolute_path,
)
from ckptkit.conversion.salvaging.repair import SurveyFunction, repair_checkpoint, survey_damage
from ckptkit.engine.scan import file_checksum
from ckptkit.errors import Caution, Corrupt, IOFailure, Unsafe, Unsupported
from ckptkit.io.file import file_size, read_small
from ckptkit.io.origin import Origin
from ckptkit.io.path import is_remote
from ckptkit.layout import Blob, Fault, Layout, StoredTensor
from ckptkit.layout.renames import renaming_function
from ckptkit.models.config_differences import describe_differences
from ckptkit.models.names import HUB
from ckptkit.models.names.rename_parameters import NewName
from ckptkit.models.names.weights import find_weights, find_weights_or_none, has_weights
from ckptkit.state.directories import require_separate_destination
from ckptkit.state.draft import Conversion
from ckptkit.state.match_checkpoints import comparison_keys, rename_parameters_if_possible
from ckptkit.state.names import NameOptions, collect_name_arguments
from ckptkit.state.options import ConvertOptions

_FILL = "pass --fill-from OTHER to take the lost tensors from another checkpoint"


@dataclass(frozen=True, slots=True)
class Salvage:
    """A checkpoint with marked damage, its faults, the checkpoint that filled it, and remarks for the summary."""

    checkpoint: Checkpoint
    faults: Faults
    other: Path | None = None
    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()

    def with_account_of_lost_tensors(self, conversion: Conversion) -> Conversion:
        """Return a conversion with the account of its lost tensors; an output directory also gets it as a file.

        Raises `Corrupt` if no tensor is left, or if a model has lost weights and none is left.
        """
        options, faults = conversion.options, self.faults
        lost: list[Lost] = []
        filled: list[Filled] = []
        for draft in conversion.drafts:
            lost += records_of_lost_tensors(draft.given.tensors)
            filled += records_of_filled_tensors(draft.given, faults)
        entries = {} if options.writer.is_model_only else faults.entries
        unshaped = [item for item in {**faults.unplaced, **entries}.items() if options.edits.is_selected(item[0])]
        unshaped += (("", fault) for fault in faults.unnamed)
        lost += (Lost(name, fault.why, fault.path) for name, fault in unshaped)
        if not options.writer.is_model_only:
            filled += (Filled(name, words) for name, words in faults.filled_entries.items())
        kept = sum(len(draft.wanted.tensors) for draft in conversion.drafts)
        if not kept:
            raise nothing_left_error(self.checkpoint.path, lost)
        weights = self.count_lost_weights(conversion)
        if weights.lost and not (weights.own or weights.filled):
            raise no_weights_left_error(self.checkpoint, lost, weights)
        copied_files, unread = self.split_off_unreadable_files(conversion.copied_files)
        path, described_by = self.checkpoint.path, faults.described_by
        result = Account(
            [*lost, *unread], filled, tuple(faults.repaired), kept, path, described_by, self.other, weights
        )
        made: Mapping[str, bytes] = conversion.made
        if not (result.is_fully_from_source or conversion.is_file):
            made = {**made, NAME: result.to_bytes(copied_files.pop(NAME, None))}
        is_unused = self.other is not None and not filled
        unused = [f"--fill-from: took no tensor from {self.other}"] if is_unused else []
        return replace(
            conversion,
            origins=[*conversion.origins, *self.origins],
            made=made,
            copied_files=copied_files,
            notes=[*conversion.notes, *self.notes, *unused],
            salvaged=result,
        )

    def count_lost_weights(self, conversion: Conversion) -> SalvagedWeights:
        """Return which weights of the output are lost, and which come from another checkpoint."""
        drafts = [one for one in conversion.drafts if one.place == self.checkpoint.model_component.place]
        own, filled, lost = (dict[str, int]() for _ in range(3))
        for draft in drafts or conversion.drafts:
            tensors = draft.given.tensors
            names: Iterable[str] = tensors
            if not draft.writer.is_model_only:
                model = find_weights_or_none(draft.given) if has_weights(draft.given) else None
                names = model.came_from.values() if model else ()
            for name in names:
                is_filled = any(self.faults.filled.get(chunk.path) == str(self.other) for chunk in tensors[name].chunks)
                group = lost if tensors[name].is_lost else filled if is_filled else own
                group |= {name: tensors[name].spec.nbytes} if tensors[name].spec.numel else {}
        return SalvagedWeights(own, filled, lost)

    def split_off_unreadable_files(self, copied_files: Mapping[str, Path]) -> tuple[dict[str, Path], list[Lost]]:
        """Return the readable files to copy, without files of lost components, and an account of the unreadable."""
        places = self.faults.places
        kept = {name: path for name, path in copied_files.items() if not {path, *path.parents}.intersection(places)}
        readable: dict[str, Path] = {}
        unread: list[Lost] = []
        for name, path in kept.items():
            try:
                file_checksum(path.parent, path.name, file_size(path), ())
                readable[name] = path
            except (Corrupt, IOFailure) as error:
                unread.append(Lost(name, Fault.of(error).why, path))
        return readable, unread


def nothing_left_error(path: Path, lost: Sequence[Lost]) -> Corrupt:
    """Return the error for a checkpoint without a single undamaged tensor."""
    named, files = ([one for one in lost if bool(one.name) is has_name] for has_name in (True, False))
    reasons = [one.describe_loss(path) for one in files[:1]]
    if not named:
        return Corrupt(f"nothing can be salvaged: {' '.join(reasons) or 'there are no tensors'}", path=path)
    message = f"nothing can be salvaged: all {len(named)} tensors lost some data"
    reasons = [f"`{named[0].label}`: {named[0].describe_loss(path)}", *reasons]
    return Corrupt(f"{message}, such as {'; '.join(reasons)}", path=path, hint=_FILL)


def no_weights_left_error(checkpoint: Checkpoint, lost: Sequence[Lost], weights: SalvagedWeights) -> Corrupt:
    """Return the error for a checkpoint in which every weight lost some data."""
    path = checkpoint.path
    first = next(tensor for tensor in lost if tensor.name in weights.lost)
    message = f"nothing of the model can be salvaged: all {len(weights.lost)} weights lost some data"
    wrapper = find_weights(checkpoint.model_component.layout).dotted_prefix
    rest = f"; --exclude '{wrapper}.*' salvages the rest" if wrapper else ""
    why = f"such as `{first.label}`: {first.describe_loss(path)}"
    return Corrupt(f"{message}, {why}", path=path, hint=f"{_FILL}, or use an older checkpoint{rest}")


def survey_repair_and_fill(
    checkpoint: Checkpoint, output: Path, options: ConvertOptions, survey_layout: SurveyFunction | None = None
) -> Salvage:
    """Survey a checkpoint (by default by `survey_layout`), repair it, and fill the rest from `--fill-from`."""
    faults = Faults()
    other = None if options.fill_from is None else Checkpoint.open(options.fill_from)
    if other is not None:
        require_separate_destination(other, output, options.writer)
    survey_layout = survey_layout or partial(survey_damage, jobs=options.jobs, progress=options.progress)
    repaired = repair_checkpoint(checkpoint, other, faults, survey_layout)
    if other is None:
        return Salvage(repaired, faults)
    notes = []
    if faults.described_by is not None:
        words = "every item in its files agrees with that metadata in dtype, shape, length and order"
        notes.append(f"{checkpoint.path} has no metadata: ckptkit used that of {faults.described_by}; {words}")
    origin = Origin.of(other.path)
    filled, remarks = fill_from_checkpoint(
        repaired, other, faults, NameOptions(options.table, options.rename, options.base)
    )
    if faults.filled:
        remarks += warn_of_other_model(filled, other, options)
    return Salvage(filled, faults, other.path, (origin,), (*notes, *remarks))


def warn_of_other_model(checkpoint: Checkpoint, other: Checkpoint, options: ConvertOptions) -> Iterator[Caution]:
    """Yield a warning if the model that filled a checkpoint computes something else with the same tensors."""
    try:
        compared = ModelFacts.of(checkpoint, options.base).compare(ModelFacts.of(other))
    except (Corrupt, IOFailure, Unsafe) as error:
        yield Caution(f"ckptkit did not compare how the model of --fill-from computes: {error.message}")
        return
    if compared.differences:
        differences = describe_differences(compared.differences, str(other.path))
        yield Caution(f"--fill-from took tensors of a model whose {compared.described_in} differs: {differences}")


def with_earlier_account(conversion: Conversion, source: Path) -> Conversion:
    """Return a conversion that copies the account of an earlier salvage of its source, with a note on it."""
    earlier = read_account(source)
    if earlier is None:
        return conversion
    note = f"the source was {describe_account(earlier)}; {NAME} lists them"
    is_apart = conversion.is_file or NAME in conversion.copied_files
    made = conversion.made if is_apart else {**conversion.made, NAME: read_small(source / NAME, LIMIT)}
    return replace(conversion, made=made, notes=[*conversion.notes, note])


@dataclass(frozen=True, slots=True)
class FillSource:
    """Another checkpoint to fill from, with the names of its tensors and entries without the model's prefix.

    `weights` are the names of its model's tensors. `new_name` gives a tensor's name in the output, which the other
    checkpoint may already use.
    """

    path: Path
    layout: Layout
    names: Mapping[str, str]
    weights: frozenset[str]
    new_name: NewName
    remarks: tuple[str, ...] = ()

    def find_tensor(self, name: str) -> StoredTensor | None:
        stored = self.layout.tensors.get(self.name_in_source(name))
        if stored is None:
            return None
        return replace(stored, chunks=tuple(with_absolute_path(chunk, self.layout.root) for chunk in stored.chunks))

    def name_in_source(self, name: str) -> str:
        """Return its own name of an entry, "" if it has no such entry."""
        return self.names.get(name) or self.names.get(self.new_name(name), "")

    def find_entry(self, name: str) -> Blob | None:
        """Return the non-tensor entry of a name, with its absolute path; None if it is missing."""
        blob = self.layout.blobs.get(self.name_in_source(name))
        return blob and blob._replace(path=os.path.abspath(self.layout.root / blob.path))


def fill_from_checkpoint(
    checkpoint: Checkpoint, other: Checkpoint, faults: Faults, named: NameOptions
) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint whose lost tensors, or lost parts of tensors, are replaced by another checkpoint's.

    `named` are the user's options about names in either. Also returns remarks on names and shapes that do not fit.
    """
    for path in (checkpoint.path, other.path):
        if is_remote(path):
            raise Unsupported("ckptkit cannot fill from or into a remote checkpoint", path=path, hint="copy it here")
    source_of = partial(open_fill_source, checkpoint=checkpoint, other=other, named=named)
    fillers = {component.place: source_of(component.layout) for component in other.components}
    joined = source_of(other.layout) if len(fillers) > 1 else next(iter(fillers.values()))
    filled = [
        fill_component(component, fillers.get(component.place, joined), faults) for component in checkpoint.components
    ]
    remarks = [remark for filler in (*fillers.values(), joined) for remark in filler.remarks]
    remarks += [remark for _, more in filled for remark in more]
    return replace(checkpoint, components=tuple(component for component, _ in filled)), list(dict.fromkeys(remarks))


def open_fill_source(layout: Layout, checkpoint: Checkpoint, other: Checkpoint, named: NameOptions) -> FillSource:
    """Return a layout of the other checkpoint as a source, its names translated to the family of this checkpoint."""
    remarks: list[str] = []
    model = find_weights_or_none(checkpoint.model_component.layout)
    ours = named.find_table_for(model.layout.tensors) if model else None
    if (named.table or checkpoint.family is not other.family) and has_weights(layout):
        config = named.find_config_of(other) or checkpoint.companions.config
        family = ours or checkpoint.family
        asked = collect_name_arguments(other, family.name if family else HUB, config, named.table)
        layout, remarks = rename_parameters_if_possible(layout, asked, other.path)
    own, model = names_without_model_prefix(layout), find_weights_or_none(layout)
    weights = frozenset(own[name] for name in model.came_from.values()) if model else frozenset()
    names = {new: name for name, new in own.items()}
    return FillSource(other.path, layout, names, weights, renaming_function(named.rename), tuple(remarks))


def names_without_model_prefix(layout: Layout) -> dict[str, str]:
    """Return the name of each entry without the prefix of the model; the full name if that would be ambiguous."""
    model = find_weights_or_none(layout)
    names = {name: name for name in layout.names}
    if model is None:
        return names
    own = {name: ".".join(map(str, key)) for name, key in comparison_keys(layout, model).items()}
    return own if len(set(own.values())) == len(own) else names


def fill_component(component: Component, fill_source: FillSource, faults: Faults) -> tuple[Component, list[str]]:
    """Return a component with its lost tensors and entries from the other checkpoint, and remarks on misfits."""
    remarks = []
    layout = component.salvaged
    assert layout is not None
    own = names_without_model_prefix(layout)
    tensors, blobs = dict(layout.tensors), dict(layout.blobs)
    for name in [name for name, tensor in tensors.items() if tensor.is_lost]:
        filling = fill_source.find_tensor(own[name])
        if filling is not None and not can_replace(replace(tensors[name], splits=None), filling):
            found = f"found {filling.spec} in {fill_source.path}"
            remarks.append(f"did not fill `{name}`: expected {tensors[name].spec}, {found}")
        elif filling is not None:
            faults.record_fill_source(filling.chunks, str(fill_source.path))
            tensors[name] = replace(filling, spec=tensors[name].spec)
    # the lost entries, too, by their names without the prefix of the model
    lost = {name: Blob("", 0, 0, b"") for name in faults.entries if name in layout.keys or not layout.keys}
    own_with_lost = names_without_model_prefix(replace(layout, blobs={**layout.blobs, **lost}))
    for name in lost:
        if (blob := fill_source.find_entry(own_with_lost[name])) is not None:
            blobs[name] = blob
            faults.filled_entries[name] = str(fill_source.path)
            del faults.entries[name]
    absent = [name for name in faults.unplaced if name not in layout.names]  # tensors without a known shape
    if faults.unnamed and component.is_model and not layout.keys:
        # the contents of some files are unknown: they may be any weights that only the other checkpoint has
        absent += sorted(fill_source.weights - set(layout.names) - set(absent))
    for name in absent:
        filling = fill_source.find_tensor(name)
        if filling is not None:
            faults.record_fill_source(filling.chunks, str(fill_source.path))
            tensors[name] = filling
            faults.unplaced.pop(name, None)
    return replace(component, salvaged=replace(layout, tensors=tensors, blobs=blobs)), remarks
