"""Write a drafted conversion: stage -> create -> plan -> copy -> check -> finalize -> manifest -> commit.

Several processes can share the work. Each performs the steps up to `copy_by_plan`; one of them performs the rest.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.component import require_archives_of_one_save
from ckptkit.engine.copy import copy_by_plan, verify_copy
from ckptkit.engine.ledger import Journal, Ledger
from ckptkit.engine.shares import WHOLE, Share
from ckptkit.errors import Corrupt, IOFailure, Occupied
from ckptkit.io.allocation import create_file, make_directory, require_free_space, unallocated_bytes
from ckptkit.io.disk import sync_directory_tree
from ckptkit.io.file import file_size, is_existing_path, opening, read_at
from ckptkit.io.path import is_remote
from ckptkit.io.progress import make_progress_reporter
from ckptkit.io.staging import Stage, errors_naming_destination
from ckptkit.layout.plan import Plan
from ckptkit.settings import option_name
from ckptkit.state.draft import Conversion
from ckptkit.state.options import RANK, parse_part
from ckptkit.state.output_files import (
    create_output_files,
    finalize_output_files,
    require_all_shares_done,
    write_generated_files,
)
from ckptkit.state.report import Written

# Ranks of one `torchrun` signal rank 0 through torch's store that they are done. Files on disk cannot be the signal:
# they may be left from an earlier job that died.
_ARRIVED = "ckptkit/arrived"
_POLL_SECONDS = 0.1  # between two polls of the number of finished ranks
_COPY_BYTES = 1 << 22  # bytes in memory for a file copy
_MAX_WAIT = timedelta(days=30)  # longest difference between the work of two ranks


def write_output(conversion: Conversion) -> Written:
    """Create and fill the output, or this process's share of it. The output appears atomically, and only when complete.

    Continues the work of an interrupted call with the same arguments.
    """
    write_share, finish = writers_for(conversion)
    part, share = conversion.options.part, WHOLE
    if part == RANK:
        share = Share(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    elif part is not None:
        number, count = parse_part(part)
        share = Share(number - 1, count)
    if share.number == 0:  # once is enough for all processes that share the work
        for one in conversion.entries:
            require_archives_of_one_save(one.read)
    written = write_share(conversion, share)
    if part != RANK or share.count == 1:
        return written
    let_rank_zero_wait()
    return finish(conversion, share.count) if share.number == 0 else written


def finish_output(conversion: Conversion, share_count: int) -> Written:
    """Finish an output that `share_count` processes have written together."""
    return writers_for(conversion)[1](conversion, share_count)


def writers_for(
    conversion: Conversion,
) -> tuple[Callable[[Conversion, Share], Written], Callable[[Conversion, int], Written]]:
    """Return the functions that write a share of the output, and that combine several shares."""
    if is_remote(conversion.output):
        from ckptkit.state.to_store import finish_shares_in_store, write_share_to_store

        return write_share_to_store, finish_shares_in_store
    return write_share_on_disk, finish_shares_on_disk


def let_rank_zero_wait() -> None:
    """Signal that this rank is done; as rank 0, also wait until all ranks are done.

    See https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    """
    from torch.distributed import DistError, rendezvous

    try:
        store, rank, ranks = next(rendezvous("env://", timeout=_MAX_WAIT))
        store.add(_ARRIVED, 1)
        while rank == 0 and store.add(_ARRIVED, 0) < ranks:
            time.sleep(_POLL_SECONDS)
    except DistError as error:
        hint = "run single parts with --part instead"
        raise IOFailure(f"the ranks cannot reach each other: {error}", hint=hint) from error


def write_share_on_disk(conversion: Conversion, share: Share) -> Written:
    """Write one share. The only share commits the output; else the stage is left to the other processes."""
    options, is_part = conversion.options, share.count > 1
    with opened_stage(conversion, share.count, is_part=is_part) as stage:
        plans = create_output_files(conversion, stage.path, share)
        if is_part:
            stage.unlock_for_other_parts()
        journals = open_journals(stage.notes_directory, conversion, share.number)
        progress = make_progress_reporter(
            options.progress, sum(plan.destination_nbytes for plan in plans) // share.count
        )
        ledgers = [
            copy_by_plan(plan, share, journal, jobs=options.jobs, progress=progress, sync=options.sync)
            for plan, journal in zip(plans, journals, strict=True)
        ]
        if not is_part:
            return verify_and_commit(conversion, plans, ledgers, stage)
        if options.sync:
            sync_directory_tree(stage.path)
        for journal in journals:
            journal.record_end(sync=options.sync)
        stage.unlock_for_resume()
    return Written(ledgers)


def finish_shares_on_disk(conversion: Conversion, share_count: int) -> Written:
    """Check that all `share_count` shares are done and consistent, then commit the output."""
    with opened_stage(conversion, share_count) as stage:
        shares = [open_journals(stage.notes_directory, conversion, number) for number in range(share_count)]
        done = {number for number in range(share_count) if all(journal.has_ended for journal in shares[number])}
        require_all_shares_done(conversion, done, share_count)
        require_complete_files(conversion, stage.path)
        plans = create_output_files(conversion, stage.path)
        ledgers = [Ledger() for _ in plans]
        for journals in shares:
            for journal, ledger in zip(journals, ledgers, strict=True):
                for unit in journal.units.values():
                    ledger.add_ledger(unit)
        return verify_and_commit(conversion, plans, ledgers, stage)


def require_complete_files(conversion: Conversion, directory: Path) -> None:
    """Raise `Corrupt` if a file that the journals say is filled is missing or truncated."""
    for draft in conversion.drafts:
        for file in draft.files:
            path = directory / draft.place / file.name
            size = file_size(path) if is_existing_path(path) else 0
            if size != file.nbytes:
                message = f"expected {file.nbytes} bytes, as written before, found {size}"
                raise Corrupt(message, path=path, hint=f"delete {directory}, and run all parts again")


def open_journals(notes_directory: Path, conversion: Conversion, share_index: int) -> list[Journal]:
    return [Journal(notes_directory / f"plan-{i}-share-{share_index}.jsonl") for i in range(len(conversion.drafts))]


@contextmanager
def opened_stage(conversion: Conversion, share_count: int, *, is_part: bool = False) -> Iterator[Stage]:
    """Open the stage in which `share_count` processes write.

    An error deletes it, unless others or a later call need it.
    """
    options = conversion.options
    stage = Stage(
        conversion.output,
        overwrite=options.overwrite,
        sync=options.sync,
        key=conversion.shared_options_key(share_count),
        is_part=is_part,
        is_file=conversion.is_file,
        check_other=partial(require_same_options, conversion, share_count),
    )
    with errors_naming_destination(conversion.output, is_file=conversion.is_file):
        try:
            if not stage.path.exists():  # before a part makes it, because other parts may use it from then on
                require_free_space(conversion.output, sum(conversion.file_sizes.values()))
            stage.open()
            require_free_space(conversion.output, unallocated_bytes(stage.path, conversion.file_sizes))
            yield stage
        except BaseException as error:
            if share_count > 1:  # other processes may still use the stage
                stage.unlock_for_resume()
            elif not isinstance(error, Exception) and any(stage.notes_directory.glob("*.jsonl")):
                stage.unlock_for_resume()
                error.add_note(f"the same command continues with the files in {stage.path}")
            else:
                stage.discard()
            raise


def require_same_options(conversion: Conversion, share_count: int, earlier_key: bytes, notes_directory: Path) -> None:
    """Raise `Occupied` if existing shares of the output have other sources or options.

    `earlier_key` is the key of these shares. If a source has changed since, its shares are simply written again.
    """
    theirs, ours = options_in_key(earlier_key), options_in_key(conversion.shared_options_key(share_count))
    parts_done = sorted(
        {int(path.stem.rpartition("-")[2]) + 1 for path in notes_directory.glob("plan-*-share-*.jsonl")}
    )
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if theirs.get("--part", 1) == 1 or not parts_done or not different:
        return
    parts = ", ".join(f"{number}/{theirs['--part']}" for number in parts_done[:8])
    name = different[0]
    expected, found = format_option_value(name, theirs.get(name)), format_option_value(name, ours[name])
    message = f"parts {parts} of an unfinished output have other options: {name}: expected {expected}, found {found}"
    hint = f"pass the same sources and options; to start over, delete {notes_directory.parent}"
    raise Occupied(message, path=conversion.output, hint=hint)


def format_option_value(name: str, value: Any) -> str:
    """Return the value of an option in a key, as users pass it."""
    if name == "--part":
        return f"I/{value}" if value > 1 else "none"
    if isinstance(value, list):
        return ", ".join(format_option_value("", one) for one in value) or "none"
    return str(value)


def options_in_key(key: bytes) -> dict[str, Any]:
    """Return the options in a key, by the names that users pass; {} for a key that this version did not write."""
    try:
        agreed = json.loads(key)
        options = {option_name(name): value for name, value in agreed["options"].items()}
        return {"source": agreed["sources"], "--part": int(agreed["parts"]), **options}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def verify_and_commit(
    conversion: Conversion, plans: Sequence[Plan], ledgers: Sequence[Ledger], stage: Stage
) -> Written:
    """Verify that everything is copied, write manifests and other files, and commit the output."""
    jobs = conversion.options.jobs
    copied = [verify_copy(plan, ledger, jobs=jobs) for plan, ledger in zip(plans, ledgers, strict=True)]
    write_generated_files(conversion, stage.path)
    for name, path in conversion.copied_files.items():
        make_directory((stage.path / name).parent)
        with opening(path) as file:
            starts = range(0, file.size, _COPY_BYTES)
            parts = ((start, read_at(file, min(_COPY_BYTES, file.size - start), start)) for start in starts)
            create_file(stage.path / name, file.size, parts, must_be_new=False)
    finalize_output_files(conversion, plans, copied)
    for origin in (*conversion.origins, *conversion.also_read):
        origin.require_unchanged()
    stage.commit()
    return Written(ledgers, copied)
