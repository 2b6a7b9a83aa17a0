"""Deletions: `ckptkit prune` under failing calls and crashes; no checkpoint is ever half there. Case 58."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.faults.cases import Case, Seen
from tests.faults.originals import original
from tests.faults.points import CHANGING, Trouble, spread
from tests.faults.scenes import Tree, put, read_tree
from tests.faults.server import Ended
from tests.faults.shim import Fault
from tests.faults.stage import serve
from tests.faults.verdicts import Verdict, judge_error

_STEPS, _KEPT = (1, 2, 3, 4), {"ckpt-3", "ckpt-4"}
_FEW, _MANY = 2, 40
TROUBLES = (
    Trouble("kill -9 before", "signal", 9, CHANGING, crashes=True),
    Trouble("kill -9 after", "torn", 9, CHANGING, crashes=True),
    Trouble("EIO", "error", errno.EIO, CHANGING),
    Trouble("EACCES from there on", "error", errno.EACCES, CHANGING, forever=True),
    Trouble("EINTR", "error", errno.EINTR, CHANGING, is_harmless=True),
)


def try_deleting(troubles: tuple[Trouble, ...], place: Path, whole: bool) -> Iterator[Seen]:
    """Let each trouble come to a prune, look at what is left, and prune again with nothing in the way."""
    root = place / "run"
    checkpoint = read_tree(original("dcp").root)
    for trouble in troubles:
        fault = Fault(str(root), kind=trouble.kind, number=trouble.number, calls=trouble.calls)
        lay(root, checkpoint)
        total = prune(root, replace(fault, kind="nothing", forever=True)).fired
        for at in spread(total, _MANY if whole else _FEW):
            lay(root, checkpoint)
            ended = prune(root, replace(fault, at=at, forever=trouble.forever))
            verdict, seen = judge(root, checkpoint, trouble, ended)
            what = f"{trouble.name} at call {at} of {total}, {ended.where.replace(f'{root}/', '')}: {seen}"
            yield Seen("ckptkit prune", verdict if ended.fired else Verdict.UNFIRED, what)


def lay(root: Path, checkpoint: Tree) -> None:
    """A run of several checkpoints, all alike."""
    put({f"ckpt-{step}/{name}": content for step in _STEPS for name, content in nested(checkpoint).items()}, root)


def nested(tree: Tree) -> Tree:
    """The tree with its own directory before all that is in it."""
    return {"": b"", **tree}


def prune(root: Path, fault: Fault | None = None) -> Ended:
    """Keep the newest two."""
    return serve().run("ckptkit", ["prune", str(root), "--keep-last", "2", "--yes"], fault=fault)


def judge(root: Path, checkpoint: Tree, trouble: Trouble, ended: Ended) -> tuple[Verdict, str]:
    """What became of the checkpoints, and what becomes of them when all goes well after it."""
    there = {path.name for path in root.iterdir() if not path.name.startswith(".")}
    seen = f"code {ended.code}, {', '.join(sorted(there))} there: {ended.err.strip()}"
    if not there >= _KEPT:
        return Verdict.LOST, seen
    if any(read_tree(root / name) != checkpoint for name in there):
        return Verdict.HALF, seen
    again = prune(root)
    left = {path.name for path in root.iterdir()}
    if again.code or left != _KEPT:
        return Verdict.HALF, f"{seen}; run again: code {again.code}, {', '.join(sorted(left))} there"
    return judge_words(root, there, trouble, ended), seen


def judge_words(root: Path, there: set[str], trouble: Trouble, ended: Ended) -> Verdict:
    """Whether it said what became of them."""
    if ended.code == 0:  # what could not be read is left alone, and that is said
        return Verdict.RIGHT if there == _KEPT or "left alone" in ended.out else Verdict.SILENT
    if trouble.crashes:
        return Verdict.RIGHT
    return Verdict.UNNAMED if trouble.is_harmless else judge_error(ended, [str(root)])


CASES = (Case("58", "prune", "failing calls and crashes while deleting", partial(try_deleting, TROUBLES)),)
