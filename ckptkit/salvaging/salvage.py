"""Salvage the source of a conversion: repair it before the draft, and account for the lost tensors after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.account import LIMIT, NAME, Account, Filled, Lost, describe_account, read_account
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.conversion.directories import check_apart
from ckptkit.conversion.draft import Conversion
from ckptkit.conversion.options import ConvertOptions
from ckptkit.engine.scan import sum_file
from ckptkit.errors import Corrupt, IOFailure
from ckptkit.files.file import file_size, read_small
from ckptkit.files.origin import Origin
from ckptkit.layout import Fault
from ckptkit.salvaging.faults import Faults, filled_tensors, lost_entries, lost_tensors
from ckptkit.salvaging.fill import fill
from ckptkit.salvaging.repair import repair


@dataclass(frozen=True, slots=True)
class Salvage:
    """A checkpoint with its damage marked, its faults, and remarks for the report."""

    checkpoint: Checkpoint
    faults: Faults
    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()

    def account(self, conversion: Conversion) -> Conversion:
        """Return a conversion with the account of its lost tensors; an output directory gets the account as a file too.

        Raises `Corrupt` if no tensor is left.
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
        carried, unread = self.readable(conversion.carried)
        path, described_by = self.checkpoint.path, faults.described_by
        found = Account([*lost, *unread], filled, tuple(faults.repaired), kept, path, described_by)
        made: Mapping[str, bytes] = conversion.made
        if not (found.is_whole or conversion.is_file):
            made = {**made, NAME: found.to_bytes(carried.pop(NAME, None))}
        return replace(
            conversion,
            origins=[*conversion.origins, *self.origins],
            made=made,
            carried=carried,
            notes=[*conversion.notes, *self.notes],
            salvaged=found,
        )

    def readable(self, carried: Mapping[str, Path]) -> tuple[dict[str, Path], list[Lost]]:
        """Return the readable other files that do not belong to a lost part, and an account of the unreadable ones."""
        places = self.faults.places
        kept = {name: path for name, path in carried.items() if not {path, *path.parents}.intersection(places)}
        unread = [Lost(name, fault.why, path) for name, path in kept.items() if (fault := fault_of(path))]
        return {name: path for name, path in kept.items() if name not in {one.name for one in unread}}, unread

    def unshaped(self, options: ConvertOptions) -> list[tuple[str, Fault]]:
        """Return the faults of lost entries without a shape, if `options` ask for them: name and fault."""
        entries = {} if options.writer.is_model_only else self.faults.entries
        named = [
            (name, fault) for name, fault in {**self.faults.unplaced, **entries}.items() if options.edits.admit(name)
        ]
        return [*named, *(("", fault) for fault in self.faults.unnamed)]


def nothing_left(path: Path, lost: Sequence[Lost]) -> Corrupt:
    """Return the error for a checkpoint without a single whole tensor."""
    named, files = ([one for one in lost if bool(one.name) is has_name] for has_name in (True, False))
    reasons = [one.describe(path) for one in files[:1]]
    if not named:
        return Corrupt(f"nothing can be salvaged: {' '.join(reasons) or 'there are no tensors'}", path=path)
    hint = "ranks that shard every tensor each have a part of it: --fill-from OTHER takes them from another checkpoint"
    message = f"nothing can be salvaged: all {len(named)} tensors have lost something"
    reasons = [f"`{named[0].label}`: {named[0].describe(path)}", *reasons]
    return Corrupt(f"{message}, such as {'; '.join(reasons)}", path=path, hint=hint)


def fault_of(path: Path) -> Fault | None:
    """Return why a file cannot be read to its end, None if it can."""
    try:
        sum_file(path.parent, path.name, file_size(path), ())
    except (Corrupt, IOFailure) as error:
        return Fault.of(error)
    return None


def salvage(checkpoint: Checkpoint, output: Path, options: ConvertOptions) -> Salvage:
    """Survey a checkpoint, repair it from the copies that it has, and fill the rest from another if one is given."""
    faults = Faults()
    other = None if options.fill_from is None else Checkpoint.open(options.fill_from)
    if other is not None:
        check_apart(other, output, options.writer)
    repaired = repair(checkpoint, other, faults, jobs=options.jobs, progress=options.progress)
    if other is None:
        return Salvage(repaired, faults)
    notes = []
    if faults.described_by is not None:
        words = "every item in its files has the dtype, shape, length and order that it says"
        notes.append(f"{checkpoint.path} has no metadata, so that of {faults.described_by} was used: {words}")
    origin = Origin.of(other.path)
    filled, remarks = fill(repaired, other, faults)
    return Salvage(filled, faults, (origin,), (*notes, *remarks))


def with_earlier_account(conversion: Conversion, source: Path) -> Conversion:
    """Return a conversion that copies the account of an earlier salvage of its source, with a note on it."""
    earlier = read_account(source)
    if earlier is None:
        return conversion
    note = f"the source was {describe_account(earlier)}; {NAME} lists them"
    is_apart = conversion.is_file or NAME in conversion.carried
    made = conversion.made if is_apart else {**conversion.made, NAME: read_small(source / NAME, LIMIT)}
    return replace(conversion, made=made, notes=[*conversion.notes, note])
