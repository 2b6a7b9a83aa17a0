"""Delete the checkpoints of a run that no rule keeps, or demote them to their weights.

An incomplete or damaged checkpoint is neither deleted nor counted by the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, named_in, no_checkpoint
from ckptkit.checkpoints.examination import examine_checkpoint
from ckptkit.checkpoints.examination.inconsistency import Certainty
from ckptkit.checkpoints.replaceable import unknown_entries
from ckptkit.checks.verify import verify_part
from ckptkit.errors import Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage, first_of, translate_os_errors
from ckptkit.formats import of_no_format
from ckptkit.io.file import folders
from ckptkit.io.joined import roots_of
from ckptkit.io.path import is_remote
from ckptkit.io.progress import Progress, Told, report_progress
from ckptkit.runs.demote import demote, plan_demotion
from ckptkit.runs.keeper import RunBackend, find_holds, keeper_of, refuse_checkpoint, run_of
from ckptkit.runs.ls import in_one_line, measure
from ckptkit.runs.readers import Readers, readers_in
from ckptkit.runs.retention import Best, Policy, SavedCheckpoint, check_metric, decide, read_metrics
from ckptkit.summary import Summarized
from ckptkit.trainers import is_epoch
from ckptkit.words import count, format_bytes


@dataclass(frozen=True, slots=True)
class PruneEntry:
    """A directory of a run: its step if its name has one, its bytes, the reason of the decision, and the freed bytes.

    For a demotion, `freed_bytes` is exact also in the plan, and `deletes` are the entries and files that it deletes.
    """

    path: Path
    step: int | None
    nbytes: int
    reason: str
    freed_bytes: int = 0
    deletes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pruned(Summarized):
    """The checkpoints to keep, to delete and to demote, newest first, and `other` directories, which prune ignores.

    `deleted` is True if prune has deleted or demoted them, False for a plan.
    """

    keep: tuple[PruneEntry, ...]
    delete: tuple[PruneEntry, ...]
    other: tuple[PruneEntry, ...]
    deleted: bool
    demote: tuple[PruneEntry, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Return the bytes that prune has freed; 0 for a plan."""
        return sum(entry.freed_bytes for entry in (*self.delete, *self.demote)) if self.deleted else 0

    def summary(self) -> Iterator[str]:
        gone = [*self.demote, *self.delete]
        freed = format_bytes(sum(entry.freed_bytes for entry in gone))
        what, verb = count(len(gone), "checkpoint"), "demote" if self.demote else "delete"
        if not gone:
            yield "every checkpoint stays: nothing to delete"
        elif self.deleted:
            yield f"{verb}d {what}, {freed} freed"
        else:
            yield f"would {verb} {what} and free {freed}; nothing was {verb}d yet"


def prune(
    run: Source,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    demote: bool = False,
    yes: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Pruned:
    """Choose which checkpoints of a run to keep, and with `yes` delete the others, the oldest first.

    Keeps the newest checkpoint, the `keep_last` newest, checkpoints whose step is a multiple of `keep_every`, the best
    by `keep_best` (METRIC[:min|max][:N]), pinned checkpoints, checkpoints that a latest-checkpoint file names, and
    checkpoints that an entry of the run reads which stays: through a link, or as the base of an adapter.

    With `demote`, the other checkpoints become Hugging Face models in bfloat16 instead. `demote` works neither on
    several disks nor on S3. If a run is on several disks, a checkpoint is deleted from all of them or from none.

    Raises `Usage` without a rule, `NotACheckpoint` if `run` is not a run, `Occupied` if another process is deleting,
    and `IOFailure` if a file cannot be removed.
    """
    policy = Policy(keep_last, keep_every, None if keep_best is None else Best.parse(keep_best))
    if policy.keeps_all:
        raise Usage("no rule says what to keep", hint="pass --keep-last, --keep-every or --keep-best")
    root = run_of(run)
    keeper = keeper_of(root)
    if demote and is_remote(root):
        hint = "`ckptkit consolidate CKPT OUT` makes a model of one; OUT may be on s3://"
        raise Usage("--demote works in local directories only", path=root, hint=hint)
    if demote and len(roots_of(root)) > 1:
        hint = "`ckptkit consolidate CKPT OUT --also DIR` makes a model of one, anywhere"
        raise Usage("checkpoints on several disks cannot be demoted", path=root, hint=hint)
    with translate_os_errors(root):
        keeper.refresh()
        if not keeper.is_there():
            raise NotACheckpoint("no such directory", path=root)
        if not named_in(root):
            refuse_checkpoint(root)
            raise no_checkpoint(root)
    with keeper.pruning() if yes else nullcontext():
        plan = make_plan(keeper, policy, demote=demote)
        return apply_plan(plan, keeper, jobs, progress) if yes else plan


def make_plan(keeper: RunBackend, policy: Policy, *, demote: bool) -> Pruned:
    """Return the decision on every directory of a run. Keeps a checkpoint that another process is replacing."""
    root, unfinished = keeper.root, keeper.unfinished()
    paths = [path for path in folders(root) if not path.name.startswith(".") and path not in unfinished]
    readers = readers_in(root)
    examined = {path: examine(path, readers.get(path.name, ())) for path in paths}
    other = [
        PruneEntry(path, Checkpoint.at(path).own_step, measure(path)[0], keeper.work_on(path) or fault)
        for path, fault in examined.items()
        if isinstance(fault, str)
    ]
    complete = [saved for saved in examined.values() if isinstance(saved, SavedCheckpoint)]
    check_metric(root, complete, policy)
    keep: list[PruneEntry] = []
    go: list[PruneEntry] = []
    for verdict in decide(complete, policy):
        saved = verdict.saved
        entry = PruneEntry(saved.path, saved.step, measure(saved.path)[0], ", ".join(verdict.reasons))
        if not verdict.is_kept:
            entry = decide_entry(saved, entry, keeper, demote=demote)
        (go if entry.freed_bytes else keep).append(entry)
    for path, reason in unfinished.items():
        nbytes = measure(path)[0]
        go.append(PruneEntry(path, Checkpoint.at(path).own_step, nbytes, reason, nbytes))
    gone = tuple(go)
    return Pruned(tuple(keep), () if demote else gone, tuple(other), deleted=False, demote=gone if demote else ())


def decide_entry(saved: SavedCheckpoint, entry: PruneEntry, keeper: RunBackend, *, demote: bool) -> PruneEntry:
    """Return the entry of a checkpoint that no rule keeps. It stays, with `freed_bytes` 0, if it cannot free bytes."""
    if work := keeper.work_on(saved.path):
        return replace(entry, reason=work)
    if not demote:
        others = () if is_remote(saved.path) else unknown_entries(saved.path, set(), by_training=True)
        names = sorted(str(path.relative_to(saved.path)) for path in others)
        also = f"; it also contains {first_of(names, 3)}" if names else ""
        return replace(entry, reason=f"no rule keeps it{also}", freed_bytes=entry.nbytes)
    if saved.is_weights_only or saved.read_by:  # also by checkpoints that are demoted, because these stay
        return replace(entry, reason="only weights already" if saved.is_weights_only else saved.read_by[0][1])
    try:
        demotion = plan_demotion(saved.path)
    except (Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return replace(entry, reason=f"cannot be demoted: {error.message}")
    freed = entry.nbytes - demotion.nbytes
    if freed <= 0:
        return replace(entry, reason="its weights alone are not smaller")
    reason = f"only its weights stay; deletes {first_of(demotion.deletes, 6)}"
    return replace(entry, reason=reason, freed_bytes=freed, deletes=demotion.deletes)


def apply_plan(plan: Pruned, keeper: RunBackend, jobs: int | None, progress: Progress | None) -> Pruned:
    """Execute a plan, the oldest checkpoint first. Keeps a checkpoint that was pinned or protected meanwhile."""
    kept: list[PruneEntry] = []
    deleted: list[PruneEntry] = []
    demoted: list[PruneEntry] = []
    # twice the remaining bytes, because demote writes and verifies them
    advance = report_progress(progress, sum(2 * (entry.nbytes - entry.freed_bytes) for entry in plan.demote))
    for entry in reversed((*plan.delete, *plan.demote)):
        is_deleted = entry in plan.delete
        if reasons := keeper.delete(entry.path) if is_deleted else find_holds(entry.path):
            kept.append(replace(entry, reason=", ".join(reasons), freed_bytes=0))
        elif is_deleted:
            deleted.append(entry)
        else:
            demoted.append(demote_entry(entry, jobs, advance))
    newest_first = (*plan.keep, *reversed(kept))
    return replace(
        plan, keep=newest_first, delete=tuple(reversed(deleted)), demote=tuple(reversed(demoted)), deleted=True
    )


def demote_entry(entry: PruneEntry, jobs: int | None, progress: Told | None) -> PruneEntry:
    """Demote a checkpoint, and return its entry with the bytes that this freed."""
    nbytes, saved_at = measure(entry.path)
    wide = demote(entry.path, saved_at=saved_at, jobs=jobs, progress=progress)
    reason = f"{entry.reason}; tensors kept in fp32: {wide}" if wide else entry.reason
    return replace(entry, reason=reason, freed_bytes=nbytes - measure(entry.path)[0])


def examine(path: Path, read_by: Readers) -> SavedCheckpoint | str:
    """Return the checkpoint in a directory, or the reason why prune ignores it. Reads no tensors."""
    checkpoint = Checkpoint.at(path)
    step = checkpoint.own_step
    if any(place.is_symlink() for place in roots_of(path)):
        return "a symbolic link"
    if step is None or is_epoch(path):
        return "its name does not end with a step"
    if not checkpoint.components:
        return (checkpoint.unreadable or of_no_format(path)).message
    problems = [problem for part in checkpoint.places for problem in verify_part(part, fast=True).problems]
    if not problems:
        findings = (finding for finding in examine_checkpoint(checkpoint) if finding.certainty is Certainty.CERTAIN)
        problems = [finding.to_error(path) for finding in findings]
    if problems:
        return f"incomplete or damaged: {in_one_line(problems[0], path)}"
    try:
        return SavedCheckpoint(path, step, read_metrics(path), find_holds(path), checkpoint.is_weights_only, read_by)
    except (Corrupt, Unsafe) as error:
        return f"cannot be read: {in_one_line(error, path)}"
