"""Delete the checkpoints of a run that no rule keeps, or demote them to their weights.

An incomplete or damaged checkpoint is neither deleted nor counted by the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, no_checkpoint_error, step_checkpoints_in_run
from ckptkit.checkpoints.examination import examine_checkpoint
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.checkpoints.replaceable import unknown_entries
from ckptkit.checks.verify import verify_component
from ckptkit.errors import (
    Corrupt,
    IOFailure,
    Mismatch,
    NotACheckpoint,
    Unsafe,
    Unsupported,
    Usage,
    names_and_more,
    translate_os_errors,
)
from ckptkit.formats import no_format_error
from ckptkit.io.file import list_directories
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import is_remote
from ckptkit.io.progress import Progress, make_progress_reporter
from ckptkit.runs.demote import demote, plan_demotion
from ckptkit.runs.ls import nbytes_and_time_below, problem_in_one_line
from ckptkit.runs.retention import (
    Best,
    Dependents,
    Policy,
    SavedCheckpoint,
    decide_retention,
    dependents_by_checkpoint,
    read_metrics,
    require_known_metric,
)
from ckptkit.runs.run_backend import (
    RunBackend,
    open_run_backend,
    protections_of,
    refuse_checkpoint_as_run,
    uncached_path_of,
)
from ckptkit.summary import Summarized
from ckptkit.trainers import has_only_epoch_in_name, is_training_state
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
    if policy.is_keeping_all:
        raise Usage("no rule says what to keep", hint="pass --keep-last, --keep-every or --keep-best")
    root = uncached_path_of(run)
    keeper = open_run_backend(root)
    if demote and is_remote(root):
        hint = "`ckptkit consolidate CKPT OUT` makes a model of one; OUT may be on s3://"
        raise Usage("--demote works in local directories only", path=root, hint=hint)
    if demote and len(local_paths_of(root)) > 1:
        hint = "`ckptkit consolidate CKPT OUT --also DIR` makes a model of one, anywhere"
        raise Usage("checkpoints on several disks cannot be demoted", path=root, hint=hint)
    with translate_os_errors(root):
        keeper.drop_cached_listings()
        if not keeper.run_exists():
            raise NotACheckpoint("no such directory", path=root)
        if not step_checkpoints_in_run(root):
            refuse_checkpoint_as_run(root)
            raise no_checkpoint_error(root)
    with keeper.pruning() if yes else nullcontext():
        plan = plan_prune(keeper, policy, demote=demote)
        return execute_prune(plan, keeper, jobs, progress) if yes else plan


def plan_prune(keeper: RunBackend, policy: Policy, *, demote: bool) -> Pruned:
    """Return the decision on every directory of a run. Keeps a checkpoint that another process is replacing."""
    root, unfinished = keeper.root, keeper.unfinished_deletions()
    paths = [path for path in list_directories(root) if not path.name.startswith(".") and path not in unfinished]
    dependents = dependents_by_checkpoint(root)
    examined = {path: find_checkpoint_or_reason(path, dependents.get(path.name, ())) for path in paths}
    other = [
        PruneEntry(
            path,
            Checkpoint.in_run(path).step_in_name,
            nbytes_and_time_below(path)[0],
            keeper.find_other_process_work(path) or fault,
        )
        for path, fault in examined.items()
        if isinstance(fault, str)
    ]
    complete = [saved for saved in examined.values() if isinstance(saved, SavedCheckpoint)]
    require_known_metric(root, complete, policy)
    keep: list[PruneEntry] = []
    go: list[PruneEntry] = []
    for verdict in decide_retention(complete, policy):
        saved = verdict.saved
        entry = PruneEntry(saved.path, saved.step, nbytes_and_time_below(saved.path)[0], ", ".join(verdict.reasons))
        if not verdict.is_kept:
            try:
                with translate_os_errors(saved.path):
                    entry = plan_unkept_entry(saved, entry, keeper, demote=demote)
            except IOFailure as error:  # who may not list a directory in it cannot delete it
                entry = replace(entry, reason=f"cannot be read: {problem_in_one_line(error, saved.path)}")
        (go if entry.freed_bytes else keep).append(entry)
    for path, reason in unfinished.items():
        nbytes = nbytes_and_time_below(path)[0]
        go.append(PruneEntry(path, Checkpoint.at(path).step_in_name, nbytes, reason, nbytes))
    gone = tuple(go)
    return Pruned(tuple(keep), () if demote else gone, tuple(other), deleted=False, demote=gone if demote else ())


def plan_unkept_entry(saved: SavedCheckpoint, entry: PruneEntry, keeper: RunBackend, *, demote: bool) -> PruneEntry:
    """Return the entry of a checkpoint that no rule keeps. It stays, with `freed_bytes` 0, if it cannot free bytes."""
    if work := keeper.find_other_process_work(saved.path):
        return replace(entry, reason=work)
    if not demote:
        others = () if is_remote(saved.path) else unknown_entries(saved.path, set(), output_is_training=True)
        foreign = (path for path in others if not is_training_state(path.name))
        names = sorted(str(path.relative_to(saved.path)) for path in foreign)
        also = f"; it also contains {names_and_more(names, 3)}" if names else ""
        return replace(entry, reason=f"no rule keeps it{also}", freed_bytes=entry.nbytes)
    if saved.is_weights_only or saved.dependents:  # one that is demoted counts too, because it stays
        return replace(entry, reason="only weights already" if saved.is_weights_only else saved.dependents[0][1])
    try:
        demotion = plan_demotion(saved.path)
    except (Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return replace(entry, reason=f"cannot be demoted: {error.message}")
    freed = entry.nbytes - demotion.nbytes
    if freed <= 0:
        return replace(entry, reason="its weights alone are not smaller")
    reason = f"only its weights stay, in bfloat16; deletes {names_and_more(demotion.deletes, 6)}"
    return replace(entry, reason=reason, freed_bytes=freed, deletes=demotion.deletes)


def execute_prune(plan: Pruned, keeper: RunBackend, jobs: int | None, progress: Progress | None) -> Pruned:
    """Execute a plan, the oldest checkpoint first. Keeps a checkpoint that was pinned or protected meanwhile."""
    kept: list[PruneEntry] = []
    deleted: list[PruneEntry] = []
    demoted: list[PruneEntry] = []
    # twice the remaining bytes, because demote writes and verifies them
    advance = make_progress_reporter(progress, sum(2 * (entry.nbytes - entry.freed_bytes) for entry in plan.demote))
    for entry in reversed((*plan.delete, *plan.demote)):
        is_deleted = entry in plan.delete
        if reasons := keeper.delete_checkpoint(entry.path) if is_deleted else protections_of(entry.path):
            kept.append(replace(entry, reason=", ".join(reasons), freed_bytes=0))
        elif is_deleted:
            deleted.append(entry)
        else:
            nbytes, saved_at = nbytes_and_time_below(entry.path)
            wide = demote(entry.path, saved_at=saved_at, jobs=jobs, progress=advance)
            reason = f"{entry.reason}; tensors kept in fp32: {wide}" if wide else entry.reason
            freed = nbytes - nbytes_and_time_below(entry.path)[0]
            demoted.append(replace(entry, reason=reason, freed_bytes=freed))
    newest_first = (*plan.keep, *reversed(kept))
    return replace(
        plan, keep=newest_first, delete=tuple(reversed(deleted)), demote=tuple(reversed(demoted)), deleted=True
    )


def find_checkpoint_or_reason(path: Path, dependents: Dependents) -> SavedCheckpoint | str:
    """Return the checkpoint in a directory, or the reason why prune ignores it. Reads no tensors."""
    checkpoint = Checkpoint.in_run(path)
    step = checkpoint.step_in_name
    if any(place.is_symlink() for place in local_paths_of(path)):
        return "a symbolic link"
    if step is None or has_only_epoch_in_name(path):
        return "its name does not end with a step"
    if not checkpoint.components:
        error = checkpoint.unreadable or checkpoint.unsupported_files_error or no_format_error(path)
        return problem_in_one_line(error, path)
    problems = [
        problem for part in checkpoint.component_paths for problem in verify_component(part, fast=True).problems
    ]
    if not problems:
        findings = (finding for finding in examine_checkpoint(checkpoint) if finding.certainty is Certainty.CERTAIN)
        problems = [finding.to_error(path) for finding in findings]
    if problems:
        return f"incomplete or damaged: {problem_in_one_line(problems[0], path)}"
    try:
        return SavedCheckpoint(
            path, step, read_metrics(path), protections_of(path), checkpoint.is_weights_only, dependents
        )
    except (Corrupt, Unsafe) as error:
        return f"cannot be read: {problem_in_one_line(error, path)}"
