"""The pipeline: every command that writes a checkpoint is a preset of it.

arrange -> locate -> stage -> plan -> copy -> settle -> seal -> manifest -> commit

Up to `copy` it is the same for each of several processes that share the work; one of them does the rest.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptkit import edits
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import Manifest, source_of, sum_files
from ckptkit.engine.copy import Copied, copy, settle
from ckptkit.engine.journal import Journal
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.shares import Share
from ckptkit.engine.sources import place_of
from ckptkit.errors import Corrupt, Mismatch, Occupied, Unsafe, translate_os_errors
from ckptkit.files.allocation import check_room, create_file, missing_bytes, write_parts
from ckptkit.files.file import file_size, is_there, opening, read_at
from ckptkit.files.staging import Stage
from ckptkit.files.system import again
from ckptkit.files.trees import sync_tree
from ckptkit.formats import locate
from ckptkit.layout import Extent
from ckptkit.ops.conversion.drafts import Draft, Drafts
from ckptkit.ops.conversion.output import Output
from ckptkit.plan import Plan, Target, make_plan
from ckptkit.progress import telling

_PART = 1 << 22  # bytes held of a file that is copied as it is


def write(drafts: Drafts, output: Output, key: bytes) -> Copied | None:
    """Make the files and fill them, or a share of that. The destination appears whole or not at all.

    What an interrupted call with the same `key` has done is gone on with. None if others are to finish.
    """
    workers = output.workers
    if workers.count > 1:
        if workers.number is not None:
            write_share(drafts, output, key, workers.number)
        if workers.meet:
            workers.meet()
        return finish_shares(drafts, output, key) if workers.finishes else None
    with opened(drafts, output, key) as stage:
        plans = create(drafts, stage.path)
        ledgers = copy_share(plans, open_journals(stage.work, plans, 0), output)
        return finish(drafts, plans, ledgers, stage, output)


def write_share(drafts: Drafts, output: Output, key: bytes, number: int) -> None:
    """Do one share of the work, and leave the rest to others."""
    with opened(drafts, output, key, is_part=True) as stage:
        plans = create(drafts, stage.path)
        stage.let_others_in()
        journals = open_journals(stage.work, plans, number)
        copy_share(plans, journals, output)
        if output.sync:
            sync_tree(stage.path)
        for journal in journals:
            journal.end(sync=output.sync)
        stage.leave()


def finish_shares(drafts: Drafts, output: Output, key: bytes) -> Copied:
    """Check that every share has been done and that it all fits together, and let the destination appear."""
    with opened(drafts, output, key) as stage:
        require_all_done(unfinished(drafts, output), output)
        require_whole(drafts, stage.path)
        plans = create(drafts, stage.path)
        ledgers = [Ledger() for _ in plans]
        for number in range(output.workers.count):
            for journal, ledger in zip(open_journals(stage.work, plans, number), ledgers, strict=True):
                for unit in journal.units.values():
                    ledger.add(unit)
        return finish(drafts, plans, ledgers, stage, output)


def require_all_done(missing: Sequence[int], output: Output) -> None:
    """Raise `Occupied` if shares are missing."""
    if missing:
        count = output.workers.count
        parts = ", ".join(f"{number + 1}/{count}" for number in missing[:8])
        hint = "run them, or run them again: they go on where they were"
        raise Occupied(f"{len(missing)} of {count} parts are not done: {parts}", path=output.path, hint=hint)


def require_whole(drafts: Drafts, room: Path) -> None:
    """Raise `Corrupt` if a file is gone that the shares have filled, or cut: what was noted of it would be believed."""
    for draft in drafts.parts:
        for file in draft.files:
            path = room / draft.place / file.name
            there = file_size(path) if is_there(path) else 0
            if there != file.nbytes:
                message = f"{there} bytes are left of the {file.nbytes} that were written"
                raise Corrupt(message, path=path, hint=f"remove {room}, and run all parts again")


def unfinished(drafts: Drafts, output: Output) -> list[int]:
    """The shares that have not ended yet."""
    work = Stage(output.path).work
    numbers = range(output.workers.count)
    return [n for n in numbers if not all(journal.has_ended for journal in open_journals(work, drafts.parts, n))]


def open_journals(work: Path, plans: Sequence[object], number: int) -> list[Journal]:
    """The journal of a share for each plan."""
    return [Journal(work / f"plan-{i}-share-{number}.jsonl") for i in range(len(plans))]


@contextmanager
def opened(drafts: Drafts, output: Output, key: bytes | None, *, is_part: bool = False) -> Iterator[Stage]:
    """The stage, open, with room for all files. Without a key nothing of an interrupted call is gone on with.

    It is cleared away after an error, but kept after an interruption, if there is something to go on with; and always
    if others have a part in it.
    """
    stage = Stage(
        output.path,
        overwrite=output.overwrite,
        sync=output.sync,
        key=key,
        is_part=is_part,
        is_file=output.is_file,
    )
    try:
        stage.open()
        check_room(output.path, missing_bytes(stage.path, drafts.file_sizes))
        yield stage
    except BaseException as error:
        if output.workers.count > 1:
            stage.leave()
        elif not isinstance(error, Exception) and any(stage.work.glob("*.jsonl")):
            stage.leave()
            error.add_note(f"the same command goes on with what is in {stage.path}")
        else:
            stage.discard()
        raise


def create(drafts: Drafts, room: Path) -> list[Plan]:
    """Make every file with what is known of it, unless it is there, and plan what fills the holes."""
    plans = []
    for draft in drafts.parts:
        root = room / draft.place
        with translate_os_errors(root):
            again(root.mkdir, parents=True, exist_ok=True)
        for file in draft.files:
            create_file(root / file.name, file.nbytes, file.parts, anew=False)
        plans.append(plan(draft, root))
    return plans


def plan(draft: Draft, root: Path) -> Plan:
    """What fills the files of a draft. Whatever lies inside an entry that is no tensor has been written with it."""
    wanted = set(draft.source.names)
    made = edits.select(draft.writer.read(root), wanted.__contains__)
    lost = draft.source.tensors.keys() - made.tensors.keys()
    if lost:
        raise Mismatch(f"{draft.writer.name} would lose {len(lost)} tensors", path=draft.source.root, tensor=min(lost))
    return make_plan(draft.source, locate(made))


def copy_share(plans: Sequence[Plan], journals: Sequence[Journal], output: Output) -> list[Ledger]:
    """Copy this process's share of each plan."""
    share = Share(output.workers.number or 0, output.workers.count)
    total = sum(plan.nbytes for plan in plans) // share.count
    progress = telling(output.progress, total)
    pairs = zip(plans, journals, strict=True)
    return [copy(plan, share, journal, jobs=output.jobs, progress=progress) for plan, journal in pairs]


def finish(drafts: Drafts, plans: Sequence[Plan], ledgers: Sequence[Ledger], stage: Stage, output: Output) -> Copied:
    """Check that all was done, write what had to wait for the data, and let the destination appear."""
    copied = [settle(plan, ledger, jobs=output.jobs) for plan, ledger in zip(plans, ledgers, strict=True)]
    for name, content in drafts.given.items():
        with translate_os_errors(stage.path / name):
            again((stage.path / name).parent.mkdir, parents=True, exist_ok=True)
        create_file(stage.path / name, len(content), [(0, content)], anew=False)
    for name, path in drafts.copied.items():
        copy_file(path, stage.path / name)
    for draft, plan, done in zip(drafts.parts, plans, copied, strict=True):
        write_parts(plan.dst.root, draft.writer.seal(plan.dst, done.checksums))
        draft.writer.check(plan.dst)
        if not output.is_file:
            write_manifest(plan, done, drafts.names_in(draft.place), drafts.made_of or source_of(plan.src))
    drafts.origin.check()
    stage.commit()
    return Copied({}, sum(done.checked_bytes for done in copied), sum(done.unchecked_bytes for done in copied))


def copy_file(src: Path, dst: Path) -> None:
    """Copy a regular file as it is."""
    with opening(src) as file:
        size = file.size
        with translate_os_errors(dst):
            again(dst.parent.mkdir, parents=True, exist_ok=True)
        parts = ((start, read_at(file, min(_PART, size - start), start)) for start in range(0, size, _PART))
        create_file(dst, size, parts, anew=False)


def write_manifest(plan: Plan, copied: Copied, names: Iterable[str], source: Mapping[str, str]) -> None:
    """Write the manifest of a part of the output, by what was seen of its bytes while they were written."""
    root = plan.dst.root
    extents = [extent_of(target, copied) for target in plan.targets]
    whole = {name: t.chunks[0] for name, t in plan.dst.tensors.items() if len(t.chunks) == 1}
    sums = {name: copied.checksums[place_of(chunk)] if chunk.box.numel else 0 for name, chunk in whole.items()}
    content = Manifest(sum_files(root, names, extents), sums, source).to_bytes()
    create_file(root / MANIFEST, len(content), [(0, content)], anew=False)


def extent_of(target: Target, copied: Copied) -> Extent:
    """What was written of a target."""
    chunk = target.chunk
    return Extent(chunk.path, chunk.offset, chunk.length, copied.checksums[place_of(chunk)], target.name)


def check_apart(src: Path, dst: Path) -> None:
    """Raise `Unsafe` if the source lies in the destination or is it: replacing it would destroy what is being read."""
    source, target = src.resolve(), dst.resolve()
    if source == target or target in source.parents:
        raise Unsafe("the source is the destination, or lies inside it", path=dst, hint="choose another destination")
    if source in target.parents:
        raise Unsafe("the destination lies inside the source", path=dst, hint="choose another destination")


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
