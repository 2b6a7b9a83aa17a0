"""Prunes: deletes the checkpoints of a run that nothing keeps. What is not whole neither counts nor goes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.deletion import delete, deleting, is_being_written
from ckptkit.errors import CkptError, Corrupt, NotACheckpoint, Unsafe, Usage, translate_os_errors
from ckptkit.ops.verify import verify_part
from ckptkit.retention import Best, Policy, Saved, decide, read_metrics
from ckptkit.runs import Run, children, find_parts, folders, no_checkpoint, step_of


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory of a run: its step, if its name says one; the bytes it takes; and why it stays or goes."""

    path: Path
    step: int | None
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """The checkpoints to keep and to delete, newest first, and what is no complete checkpoint and left alone.

    `deleted` says whether the second are gone, or would be.
    """

    keep: tuple[Entry, ...]
    delete: tuple[Entry, ...]
    other: tuple[Entry, ...]
    deleted: bool

    @property
    def freed_bytes(self) -> int:
        """Bytes that are no longer in use."""
        return sum(entry.nbytes for entry in self.delete) if self.deleted else 0


def prune(
    run: str | Path,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    yes: bool = False,
) -> Pruned:
    """Decide which checkpoints of the run at `run` stay, and with `yes` delete the others, the oldest first.

    The newest stays, the `keep_last` newest, those of steps that are multiples of `keep_every`, and the best by
    `keep_best`, METRIC[:min|max][:N]. Raises `Usage` if nothing says what to keep, `NotACheckpoint` if `run` is no run,
    `Occupied` if another process is deleting, and `IOFailure` if something cannot be removed.
    """
    policy = Policy(keep_last, keep_every, None if keep_best is None else Best.parse(keep_best))
    if policy.keeps_all:
        raise Usage("nothing says what to keep", hint="give --keep-last, --keep-every or --keep-best")
    root = Path(run)
    with translate_os_errors(root):
        if not root.is_dir():
            raise NotACheckpoint("no such directory", path=root)
        if not Run(root).directories():
            raise no_checkpoint(root)
    with deleting(root) if yes else nullcontext():
        plan = make_plan(root, policy)
        if not yes:
            return plan
        for entry in reversed(plan.delete):
            delete(entry.path)
        return replace(plan, deleted=True)


def make_plan(root: Path, policy: Policy) -> Pruned:
    """What becomes of every directory in a run. A checkpoint that somebody is replacing just now stays."""
    paths = [path for path in folders(root) if not path.name.startswith(".")]
    found = {path: examine(path) for path in paths}
    other = [
        Entry(path, step_of(path), size_of(path), fault) for path, fault in found.items() if isinstance(fault, str)
    ]
    keep: list[Entry] = []
    go: list[Entry] = []
    for verdict in decide((saved for saved in found.values() if isinstance(saved, Saved)), policy):
        path, reasons = verdict.saved.path, verdict.reasons
        if not reasons and is_being_written(path):
            reasons = ("being written",)
        entry = Entry(path, verdict.saved.step, size_of(path), ", ".join(reasons) or "nothing keeps it")
        (keep if reasons else go).append(entry)
    return Pruned(tuple(keep), tuple(go), tuple(other), deleted=False)


def examine(path: Path) -> Saved | str:
    """The checkpoint in a directory, or why that is none that counts. Reads no tensor."""
    step = step_of(path)
    if path.is_symlink():
        return "a symbolic link"
    if step is None or path.name.startswith("epoch"):
        return "its name says no step"
    parts = find_parts(path)
    if not parts:
        return "no checkpoint in any known format"
    problems = [problem for part in parts for problem in verify_part(part, fast=True).problems]
    if problems:
        return f"not whole: {describe(problems[0], path)}"
    try:
        return Saved(path, step, read_metrics(path))
    except (Corrupt, Unsafe) as error:
        return f"not whole: {describe(error, path)}"


def describe(problem: CkptError, checkpoint: Path) -> str:
    """A problem in one line, without what is above the checkpoint."""
    path = problem.path
    if path is None or path == checkpoint or not path.is_relative_to(checkpoint):
        return problem.message
    return f"{path.relative_to(checkpoint)}: {problem.message}"


def size_of(path: Path) -> int:
    """Bytes of all files below a directory; links are not followed."""
    waiting, nbytes = [path], 0
    while waiting:
        found = waiting.pop()
        with translate_os_errors(found):
            if found.is_dir() and not found.is_symlink():
                waiting.extend(children(found))
            else:
                nbytes += found.lstat().st_size
    return nbytes
