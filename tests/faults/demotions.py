"""Demotions: `ckptkit prune --demote` under failing calls and crashes; every checkpoint is all old or new. Case 58."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.faults.cases import Case, Seen
from tests.faults.deletions import TROUBLES, lay
from tests.faults.originals import original
from tests.faults.points import Trouble, spread
from tests.faults.scenes import Tree, read_tree
from tests.faults.server import Ended
from tests.faults.shim import Fault
from tests.faults.stage import serve
from tests.faults.verdicts import Verdict, judge_error

_FEW, _MANY = 2, 60


def try_demoting(troubles: tuple[Trouble, ...], place: Path, whole: bool) -> Iterator[Seen]:
    """Let each trouble come to a demoting prune, look at what is left, and prune again with nothing in the way."""
    root = place / "run"
    old = read_tree(original("dcp").root)
    lay(root, old)
    demote(root)
    new = {path.name: read_tree(path) for path in root.iterdir()}
    for trouble in troubles:
        fault = Fault(str(root), kind=trouble.kind, number=trouble.number, calls=trouble.calls)
        lay(root, old)
        total = demote(root, replace(fault, kind="nothing", forever=True)).fired
        for at in spread(total, _MANY if whole else _FEW):
            lay(root, old)
            ended = demote(root, replace(fault, at=at, forever=trouble.forever))
            verdict, seen = judge(root, old, new, trouble, ended)
            what = f"{trouble.name} at call {at} of {total}, {ended.where.replace(f'{root}/', '')}: {seen}"
            yield Seen("ckptkit prune --demote", verdict if ended.fired else Verdict.UNFIRED, what)


def demote(root: Path, fault: Fault | None = None) -> Ended:
    """Keep the newest two whole, and of the others the weights."""
    return serve().run("ckptkit", ["prune", str(root), "--keep-last", "2", "--demote", "--yes"], fault=fault)


def judge(root: Path, old: Tree, new: Mapping[str, Tree], trouble: Trouble, ended: Ended) -> tuple[Verdict, str]:
    """What became of the checkpoints, and what becomes of them when all goes well after it."""
    there = {path.name: read_tree(path) for path in root.iterdir() if not path.name.startswith(".")}
    seen = f"code {ended.code}, {', '.join(sorted(there))} there: {ended.err.strip()}"
    if there.keys() != new.keys():
        return Verdict.LOST, seen
    if any(tree not in (old, new[name]) for name, tree in there.items()):
        return Verdict.HALF, seen
    again = demote(root)
    left = {path.name: read_tree(path) for path in root.iterdir()}
    if again.code or left != new:
        return Verdict.HALF, f"{seen}; run again: code {again.code}, {', '.join(sorted(left))} there: {again.err}"
    if trouble.crashes:
        return Verdict.RIGHT, seen
    if ended.code == 0:
        return Verdict.RIGHT if there == new or "left alone" in ended.out else Verdict.SILENT, seen
    return Verdict.UNNAMED if trouble.is_harmless else judge_error(ended, [str(root)]), seen


CASES = (Case("58", "prune", "failing calls and crashes while demoting", partial(try_demoting, TROUBLES)),)
