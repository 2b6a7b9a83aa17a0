"""Outages: the power goes at every moment of a writing, and the same is done again on what the disk has kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.cases import Seen
from tests.faults.power import Disk, read_journal
from tests.faults.scenes import Scene, Tree, put
from tests.faults.shim import Fault
from tests.faults.verdicts import Verdict


def try_outages(scene: Scene, most: int | None) -> Iterator[Seen]:
    """What is left at each moment, judged; and the writing done again, after at most `most` of them."""
    subject = scene.writing.subject
    lefts = []
    for moment, of, left in moments(scene):
        lefts.append(left)
        verdict = judge(scene, left, is_done=moment == of)
        yield Seen(subject, verdict, f"{scene.name}, power gone after change {moment} of {of}")
    chosen = lefts if most is None else lefts[:: max(1, len(lefts) // most)]
    for left in chosen if scene.writing.is_ours else ():
        put(left, scene.place)
        verdict, seen = scene.judge_again()
        yield Seen(subject, verdict, f"{scene.name}, after an outage that left {sorted(left)}, {seen}")


def moments(scene: Scene) -> Iterator[tuple[int, int, Tree]]:
    """After each change: its number, how many there are, and what may be on the disk then and was not before."""
    scene.lay()
    disk = Disk(scene.place)
    with tempfile.TemporaryDirectory() as home:
        journal = Path(home, "journal")
        ended = scene.run(Fault(str(scene.place), kind="journal", forever=True, other=str(journal)))
        assert ended.code == 0, ended
        changes = list(read_journal(journal))
    seen: list[Tree] = []
    for moment, change in enumerate(changes, start=1):
        disk.apply(change)
        for left in disk.left():
            if left not in seen or moment == len(changes):
                seen.append(left)
                yield moment, len(changes), left


def judge(scene: Scene, left: Tree, *, is_done: bool) -> Verdict:
    """Whether everybody sees the old or the new, and when the writing is done the new."""
    tree = {name: content for name, content in left.items() if not name.startswith(".")}
    if tree == scene.new:
        return Verdict.RIGHT
    if is_done:
        return Verdict.SILENT
    if tree in (scene.old, {**scene.old, **scene.new}):
        return Verdict.RIGHT
    return Verdict.LOST if scene.is_over else Verdict.HALF
