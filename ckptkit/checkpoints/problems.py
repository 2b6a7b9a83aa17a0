"""Collect the problems of a checkpoint without duplicates. All problems of a missing file count as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from itertools import islice
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Incomplete, IOFailure
from ckptkit.words import count

_NAMES_SHOWN = 3  # tensor names in a message
Key = tuple[Path | None, tuple[str, ...], str | None, int | None]  # file, or directory and files; tensor; byte


class Problems:
    """The problems of one checkpoint, without duplicates.

    Tensors that are incomplete because of one file are one problem: the file's own, if it has one.
    """

    def __init__(self) -> None:
        self._layout_or_error: dict[Key, CkptError] = {}
        self._lacking: dict[Path, dict[str, Incomplete]] = {}  # by file and tensor

    def add(self, problem: CkptError) -> None:
        """Add a problem, unless the same place already has one. Drops its traceback, which keeps files alive.

        A tensor that is incomplete because of a missing file gets no problem of its own.
        """
        problem = problem.with_traceback(None)
        files = problem.files if isinstance(problem, Incomplete) else ()
        if problem.tensor is None or problem.offset is not None:
            self._layout_or_error.setdefault((problem.path, files, problem.tensor, problem.offset), problem)
        elif isinstance(problem, Incomplete) and problem.path is not None:
            self._lacking.setdefault(problem.path, {}).setdefault(problem.tensor, problem)
        elif not any(problem.tensor in tensors for tensors in self._lacking.values()):
            self._layout_or_error.setdefault((problem.path, files, problem.tensor, None), problem)

    def has_problem_in(self, path: Path) -> bool:
        return path in self._lacking or any(known_path == path for known_path, *_ in self._layout_or_error)

    def all_problems(self) -> tuple[CkptError, ...]:
        """Return all problems: first the problems of files and single tensors, then of several tensors."""
        left = dict(self._lacking)
        problems = []
        for problem in self._layout_or_error.values():
            files: set[Path] = set()  # that the problem is about; none for the problem of a tensor
            if problem.tensor is None and problem.path is not None:
                names = problem.files if isinstance(problem, Incomplete) else ()
                files = {problem.path, *(problem.path / name for name in names)}
            lacking = [left.pop(path) for path in sorted(files & left.keys())]
            tensors = dict.fromkeys(name for by_tensor in lacking for name in by_tensor)
            problems.append(copy(problem) if tensors else problem)
            if tensors:
                affected = f"{count(len(tensors), 'tensor', 'is')} incomplete: {join_first_names(tensors)}"
                problems[-1].message = f"{problem.message}; {affected}"
                problems[-1].args = (problems[-1].message,)
        return (*problems, *map(merge_tensor_problems, left.values()))


def merge_file_problems(
    problems: Iterable[CkptError], entry_counts: Mapping[Path | None, int]
) -> tuple[CkptError, ...]:
    """Merge the problems of a file if most of its entries have one: it is probably not the file that was meant.

    Drops the problems of entries of a file that cannot be read. `entry_counts` is the number of tensors and other
    entries that the metadata lists for each file.
    """
    problems = tuple(problems)
    unreadable = {problem.path for problem in problems if isinstance(problem, IOFailure) and problem.tensor is None}
    problems = tuple(problem for problem in problems if problem.tensor is None or problem.path not in unreadable)
    wrong: dict[Path | None, set[str]] = {}
    for problem in problems:
        if problem.tensor is not None and not isinstance(problem, Incomplete):
            wrong.setdefault(problem.path, set()).add(problem.tensor)
    mismatched_files = {
        path
        for path, names in wrong.items()
        if len(names) > _NAMES_SHOWN and 2 * len(names) > entry_counts.get(path, 0)
    }
    kept: dict[object, CkptError] = {}
    for problem in problems:
        if problem.path not in mismatched_files or problem.tensor is None or isinstance(problem, Incomplete):
            kept[id(problem)] = problem
        elif problem.path not in kept:
            known = entry_counts.get(problem.path, 0)  # 0 if the metadata could not be read to its end
            of_all = f" of {known:,}" if known else ""
            what = f"{len(wrong[problem.path]):,}{of_all} entries differ from the metadata"
            message = f"{what}, such as `{problem.tensor}`: {problem.message}"
            hint = "restore the file from a copy: it may belong to another save"
            kept[problem.path] = Corrupt(message, path=problem.path, hint=hint)
    return tuple(kept.values())


def merge_tensor_problems(problem_by_tensor: dict[str, Incomplete]) -> Incomplete:
    """Merge the problems of tensors that are incomplete because of one file; a single problem is unchanged."""
    first, *others = problem_by_tensor.values()
    if not others:
        return first
    message = f"{len(problem_by_tensor):,} tensors are incomplete, such as `{first.tensor}`: {first.message}"
    if first.ranks:
        lack = f"{len(problem_by_tensor):,} tensors lack the shard of rank {first.ranks[0]}"
        message = f"{lack}: {join_first_names(problem_by_tensor)}"
    return Incomplete(message, path=first.path, hint=first.hint, ranks=first.ranks)


def join_first_names(names: Iterable[str]) -> str:
    first_names = list(islice(names, _NAMES_SHOWN + 1))
    return ", ".join(first_names[:_NAMES_SHOWN]) + (", ..." if first_names[_NAMES_SHOWN:] else "")
