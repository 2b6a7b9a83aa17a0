"""Salvage the source of a conversion: repair it before planning the output, and account for lost tensors after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.account import (
    LIMIT,
    NAME,
    Account,
    Filled,
    Lost,
    SalvagedWeights,
    describe_account,
    read_account,
)
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.conversion.salvaging.copies import Faults, filled_tensors, lost_entries, lost_tensors
from ckptkit.conversion.salvaging.fill import fill
from ckptkit.conversion.salvaging.repair import SurveyFunction, repair, survey
from ckptkit.engine.scan import sum_file
from ckptkit.errors import Caution, Corrupt, IOFailure, Mismatch, Unsafe, Unsupported
from ckptkit.io.file import file_size, read_small
from ckptkit.io.origin import Origin
from ckptkit.layout import Fault, Layout
from ckptkit.models.computation import describe_differences
from ckptkit.models.names.weights import find_weights, has_weights
from ckptkit.state.directories import require_separate_destination
from ckptkit.state.draft import Conversion
from ckptkit.state.names import NameOptions
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

    def account(self, conversion: Conversion) -> Conversion:
        """Return a conversion with the account of its lost tensors; an output directory also gets it as a file.

        Raises `Corrupt` if no tensor is left, or if a model has lost weights and none is left.
        """
        options, faults = conversion.options, self.faults
        lost: list[Lost] = []
        filled: list[Filled] = []
        for draft in conversion.drafts:
            assert draft.given is not None
            lost += lost_tensors(draft.given.tensors)
            filled += filled_tensors(draft.given, faults)
        lost += lost_entries(self.unshaped(options))
        if not options.writer.is_model_only:
            filled += (Filled(name, words) for name, words in faults.filled_entries.items())
        kept = sum(len(draft.wanted.tensors) for draft in conversion.drafts)
        if not kept:
            raise nothing_left(self.checkpoint.path, lost)
        weights = self.count_lost_weights(conversion)
        if weights.are_all_lost:
            raise no_weights_left(self.checkpoint, lost, weights)
        copied_files, unread = self.readable(conversion.copied_files)
        path, described_by = self.checkpoint.path, faults.described_by
        result = Account(
            [*lost, *unread], filled, tuple(faults.repaired), kept, path, described_by, self.other, weights
        )
        made: Mapping[str, bytes] = conversion.made
        if not (result.is_whole or conversion.is_file):
            made = {**made, NAME: result.to_bytes(copied_files.pop(NAME, None))}
        return replace(
            conversion,
            origins=[*conversion.origins, *self.origins],
            made=made,
            copied_files=copied_files,
            notes=[*conversion.notes, *self.notes, *self.say_unused(filled)],
            salvaged=result,
        )

    def count_lost_weights(self, conversion: Conversion) -> SalvagedWeights:
        """Return which weights of the output are lost, and which come from another checkpoint."""
        drafts = [one for one in conversion.drafts if one.place == self.checkpoint.model_component.place]
        own, filled, lost = (dict[str, int]() for _ in range(3))
        for draft in drafts or conversion.drafts:
            assert draft.given is not None
            tensors = draft.given.tensors
            for name in tensors if draft.writer.is_model_only else weights_in(draft.given):
                is_filled = any(self.faults.filled.get(chunk.path) == str(self.other) for chunk in tensors[name].chunks)
                group = lost if tensors[name].is_lost else filled if is_filled else own
                group |= {name: tensors[name].spec.nbytes} if tensors[name].spec.numel else {}
        return SalvagedWeights(own, filled, lost)

    def say_unused(self, filled: Sequence[Filled]) -> list[str]:
        """Return a note if `--fill-from` names a checkpoint and no tensor came from it."""
        return [] if self.other is None or filled else [f"--fill-from: took no tensor from {self.other}"]

    def readable(self, copied_files: Mapping[str, Path]) -> tuple[dict[str, Path], list[Lost]]:
        """Return the readable files to copy, without files of lost components, and an account of the unreadable."""
        places = self.faults.places
        kept = {name: path for name, path in copied_files.items() if not {path, *path.parents}.intersection(places)}
        unread = [Lost(name, fault.why, path) for name, path in kept.items() if (fault := fault_of(path))]
        return {name: path for name, path in kept.items() if name not in {one.name for one in unread}}, unread

    def unshaped(self, options: ConvertOptions) -> list[tuple[str, Fault]]:
        """Return (name, fault) of lost entries without a shape, if `options` select them."""
        entries = {} if options.writer.is_model_only else self.faults.entries
        named = [
            (name, fault) for name, fault in {**self.faults.unplaced, **entries}.items() if options.edits.admit(name)
        ]
        return [*named, *(("", fault) for fault in self.faults.unnamed)]


def nothing_left(path: Path, lost: Sequence[Lost]) -> Corrupt:
    """Return the error for a checkpoint without a single undamaged tensor."""
    named, files = ([one for one in lost if bool(one.name) is has_name] for has_name in (True, False))
    reasons = [one.describe(path) for one in files[:1]]
    if not named:
        return Corrupt(f"nothing can be salvaged: {' '.join(reasons) or 'there are no tensors'}", path=path)
    message = f"nothing can be salvaged: all {len(named)} tensors lost some data"
    reasons = [f"`{named[0].label}`: {named[0].describe(path)}", *reasons]
    return Corrupt(f"{message}, such as {'; '.join(reasons)}", path=path, hint=_FILL)


def no_weights_left(checkpoint: Checkpoint, lost: Sequence[Lost], weights: SalvagedWeights) -> Corrupt:
    """Return the error for a checkpoint in which every weight lost some data."""
    path = checkpoint.path
    first = next(tensor for tensor in lost if tensor.name in weights.lost)
    message = f"nothing of the model can be salvaged: all {len(weights.lost)} weights lost some data"
    wrapper = find_weights(checkpoint.model_component.layout).wrapper
    rest = f"; --exclude '{wrapper}.*' salvages the rest" if wrapper else ""
    why = f"such as `{first.label}`: {first.describe(path)}"
    return Corrupt(f"{message}, {why}", path=path, hint=f"{_FILL}, or use an older checkpoint{rest}")


def weights_in(layout: Layout) -> Iterable[str]:
    """Return the names of the model's tensors in a layout; () if the model is not identified."""
    try:
        return find_weights(layout).came_from.values() if has_weights(layout) else ()
    except (Mismatch, Unsupported):  # no model, or several
        return ()


def fault_of(path: Path) -> Fault | None:
    """Return why a file cannot be read to its end; None if it can."""
    try:
        sum_file(path.parent, path.name, file_size(path), ())
    except (Corrupt, IOFailure) as error:
        return Fault.of(error)
    return None


def salvage(
    checkpoint: Checkpoint, output: Path, options: ConvertOptions, look: SurveyFunction | None = None
) -> Salvage:
    """Survey a checkpoint, repair it from its own copies, and fill the rest from `--fill-from`.

    By default, `look` reads every byte.
    """
    faults = Faults()
    other = None if options.fill_from is None else Checkpoint.open(options.fill_from)
    if other is not None:
        require_separate_destination(other, output, options.writer)
    look = look or partial(survey, jobs=options.jobs, progress=options.progress)
    repaired = repair(checkpoint, other, faults, look)
    if other is None:
        return Salvage(repaired, faults)
    notes = []
    if faults.described_by is not None:
        words = "every item in its files agrees with that metadata in dtype, shape, length and order"
        notes.append(f"{checkpoint.path} has no metadata: ckptkit used that of {faults.described_by}; {words}")
    origin = Origin.of(other.path)
    filled, remarks = fill(repaired, other, faults, NameOptions(options.table, options.rename, options.base))
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
