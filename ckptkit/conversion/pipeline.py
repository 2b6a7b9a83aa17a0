"""Carry out a conversion: every command that writes a checkpoint is a preset of this.

draft -> stage -> create -> plan -> copy -> check_complete -> seal -> manifest -> commit

Up to `copy` it is the same for each of several processes that share the work; one of them does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptkit.adapters.draft import draft_adapters, open_adapters
from ckptkit.adapters.merge import draft_merge
from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.part import Part
from ckptkit.collector import collector_paused
from ckptkit.conversion.by_names import draft_by_names
from ckptkit.conversion.destination import check_apart
from ckptkit.conversion.draft import Conversion
from ckptkit.conversion.made_files import create, seal
from ckptkit.conversion.model import draft_model
from ckptkit.conversion.options import MODULE, RANK, ConvertOptions, parse_part
from ckptkit.conversion.parts import draft_parts
from ckptkit.conversion.report import Converted, Written, complete, report
from ckptkit.conversion.torchrun import rank_and_ranks, wait_for_ranks
from ckptkit.destinations.allocation import check_room, missing_bytes
from ckptkit.destinations.staging import Stage, check_destination
from ckptkit.engine.copy import check_complete, copy
from ckptkit.engine.journal import Journal
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.shares import WHOLE, Share
from ckptkit.errors import Corrupt, Occupied
from ckptkit.files.file import file_size, is_there
from ckptkit.files.path import to_local
from ckptkit.files.trees import sync_tree
from ckptkit.layout.plan import Plan
from ckptkit.progress import telling
from ckptkit.salvaging.salvage import salvage, with_earlier_account


def carry_out(sources: Sequence[Source], dst: str | Path, options: ConvertOptions) -> Converted:
    """Make of a checkpoint, or of the mean of several, what `options` say, or a part of that.

    Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit or a checksum differs.
    """
    return report_on(sources, dst, options, write)


def report_on(
    sources: Sequence[Source],
    dst: str | Path,
    options: ConvertOptions,
    work: Callable[[Conversion], Written | None],
) -> Converted:
    """Draft a conversion, do the `work`, unless it is a dry run, and report on it."""
    began = time.perf_counter()
    conversion = draft(sources, to_local(dst), options)
    prospect = report(conversion, time.perf_counter() - began)
    if options.dry_run:
        return prospect
    written = work(conversion)
    return complete(prospect, written, time.perf_counter() - began)


@collector_paused()
def draft(sources: Sequence[Source], dst: Path, options: ConvertOptions) -> Conversion:
    """Think a conversion through: find every byte, and arrange the files. Nothing is written."""
    writer = options.writer
    check_destination(dst, options.overwrite, is_file=dst.suffix in writer.suffixes)
    checkpoints = [Checkpoint.open(source).with_base(options.base) for source in sources]
    if options.salvage:
        options.check_salvage()
        check_apart(checkpoints[0], dst, writer)
        salvaged = salvage(checkpoints[0], dst, options)
        return salvaged.account(draft_of([salvaged.checkpoint], dst, options))
    return with_earlier_account(draft_of(checkpoints, dst, options), checkpoints[0].path)


def draft_of(checkpoints: Sequence[Checkpoint], dst: Path, options: ConvertOptions) -> Conversion:
    """Think a conversion of opened checkpoints through."""
    writer = options.writer
    if options.weights_from == MODULE:
        checkpoints = [checkpoint.with_twins() for checkpoint in checkpoints]
    for checkpoint in checkpoints:
        check_apart(checkpoint, dst, writer)
    if not (writer.is_model_only or options.weights or options.merge):
        return (draft_by_names if writer.needs_names else draft_parts)(checkpoints[0], dst, options)
    parts, remarks = choose_models(checkpoints, options)
    if options.merge:
        return draft_merge(parts, remarks, dst, options)
    adapted = [found for part in parts if (found := open_adapters(part, options))]
    if adapted:
        return draft_adapters(adapted, remarks, dst, options)
    return draft_model(parts, remarks, dst, options)


def choose_models(checkpoints: Sequence[Checkpoint], options: ConvertOptions) -> tuple[list[Part], list[str]]:
    """Return the part of each checkpoint with the model that is to be written, and words on what else it could be."""
    parts: list[Part] = []
    notes: list[str] = []
    for checkpoint in checkpoints:
        exported = None if options.salvage or options.weights_from == MODULE else checkpoint.exported
        parts.append(exported or checkpoint.model_part)
        if exported:
            name, states = exported.path.name, checkpoint.model_part.place
            notes.append(f"`{name}` was taken, which is for use; name `{states}` to take the weights in its states")
    return parts, list(dict.fromkeys(notes))


def write(conversion: Conversion) -> Written | None:
    """Make the files and fill them, or a part of that. The destination appears whole or not at all.

    Goes on with what an interrupted call for the same has done. Returns None if others are to finish.
    """
    part = conversion.options.part
    share = share_of(part)
    if share.count == 1:
        return write_alone(conversion)
    write_share(conversion, share)
    if part != RANK:
        return None
    wait_for_ranks()
    return finish_shares(conversion, share.count) if share.number == 0 else None


def share_of(part: str | None) -> Share:
    """Return the share of the work that is this process's."""
    if part is None:
        return WHOLE
    if part == RANK:
        return Share(*rank_and_ranks())
    number, count = parse_part(part)
    return Share(number - 1, count)


def write_alone(conversion: Conversion) -> Written:
    """Do all of the work."""
    with opened(conversion, WHOLE.count) as stage:
        plans = create(conversion, stage.path)
        ledgers = copy_share(conversion, plans, open_journals(stage.work, conversion, 0), WHOLE)
        return finish(conversion, plans, ledgers, stage)


def write_share(conversion: Conversion, share: Share) -> None:
    """Do one share of the work, and leave the rest to others."""
    sync = conversion.options.sync
    with opened(conversion, share.count, is_part=True) as stage:
        plans = create(conversion, stage.path, share)
        stage.let_others_in()
        journals = open_journals(stage.work, conversion, share.number)
        copy_share(conversion, plans, journals, share)
        if sync:
            sync_tree(stage.path)
        for journal in journals:
            journal.end(sync=sync)
        stage.leave()


def finish_shares(conversion: Conversion, count: int) -> Written:
    """Check that every one of `count` shares has been done and all fits together, and let the destination appear."""
    with opened(conversion, count) as stage:
        require_all_done(conversion, stage.work, count)
        require_whole(conversion, stage.path)
        plans = create(conversion, stage.path)
        ledgers = [Ledger() for _ in plans]
        for number in range(count):
            for journal, ledger in zip(open_journals(stage.work, conversion, number), ledgers, strict=True):
                for unit in journal.units.values():
                    ledger.add(unit)
        return finish(conversion, plans, ledgers, stage)


def require_all_done(conversion: Conversion, work: Path, count: int) -> None:
    """Raise `Occupied` if some of `count` shares have not ended."""
    numbers = range(count)
    missing = [n for n in numbers if not all(journal.has_ended for journal in open_journals(work, conversion, n))]
    if missing:
        parts = ", ".join(f"{number + 1}/{count}" for number in missing[:8])
        hint = "run them, or run them again: they go on where they were"
        raise Occupied(f"{len(missing)} of {count} parts are not done: {parts}", path=conversion.output, hint=hint)


def require_whole(conversion: Conversion, room: Path) -> None:
    """Raise `Corrupt` if a file is gone that the shares have filled, or cut: what was noted of it would be believed."""
    for draft in conversion.drafts:
        for file in draft.files:
            path = room / draft.place / file.name
            there = file_size(path) if is_there(path) else 0
            if there != file.nbytes:
                message = f"{there} bytes are left of the {file.nbytes} that were written"
                raise Corrupt(message, path=path, hint=f"remove {room}, and run all parts again")


def open_journals(work: Path, conversion: Conversion, number: int) -> list[Journal]:
    return [Journal(work / f"plan-{i}-share-{number}.jsonl") for i in range(len(conversion.drafts))]


@contextmanager
def opened(conversion: Conversion, count: int, *, is_part: bool = False) -> Iterator[Stage]:
    """Open the stage on which `count` processes make the output, with room for all files.

    It is cleared away after an error, but kept after an interruption, if there is something to go on with; and always
    if others have a part in it.
    """
    options = conversion.options
    stage = Stage(
        conversion.output,
        overwrite=options.overwrite,
        sync=options.sync,
        key=conversion.key(count),
        is_part=is_part,
        is_file=conversion.is_file,
    )
    try:
        stage.open()
        check_room(conversion.output, missing_bytes(stage.path, conversion.file_sizes))
        yield stage
    except BaseException as error:
        if count > 1:
            stage.leave()
        elif not isinstance(error, Exception) and any(stage.work.glob("*.jsonl")):
            stage.leave()
            error.add_note(f"the same command goes on with what is in {stage.path}")
        else:
            stage.discard()
        raise


def copy_share(
    conversion: Conversion, plans: Sequence[Plan], journals: Sequence[Journal], share: Share
) -> list[Ledger]:
    """Copy a share of each plan."""
    options = conversion.options
    progress = telling(options.progress, sum(plan.whole_nbytes for plan in plans) // share.count)
    pairs = zip(plans, journals, strict=True)
    return [
        copy(plan, share, journal, jobs=options.jobs, progress=progress, sync=options.sync) for plan, journal in pairs
    ]


def finish(conversion: Conversion, plans: Sequence[Plan], ledgers: Sequence[Ledger], stage: Stage) -> Written:
    """Check that all was done, write what had to wait for the data, and let the destination appear."""
    jobs = conversion.options.jobs
    copied = [check_complete(plan, ledger, jobs=jobs) for plan, ledger in zip(plans, ledgers, strict=True)]
    seal(conversion, plans, copied, stage.path)
    for origin in conversion.origins:
        origin.check()
    stage.commit()
    return copied, ledgers
