"""Changes in place: `ckptkit apply LOCAL ROOT --in-place` under failing calls, crashes and power loss. Case 64.

After each the model is old, new, or has a journal: then `verify` refuses it, and the same command makes it new.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch

import ckptkit
from tests.faults.cases import Case, Seen
from tests.faults.deletions import TROUBLES
from tests.faults.points import Trouble, spread
from tests.faults.power import Disk, read_journal
from tests.faults.scenes import Tree, put, read_tree
from tests.faults.server import Ended
from tests.faults.shim import Fault
from tests.faults.stage import serve
from tests.faults.verdicts import Verdict, judge_error
from tests.plugins.deltas.models import as_hf, load, policy, step

_FEW, _MANY = 2, 40  # points of a kind of trouble: in the fast share, and of those that leave the process alive


@dataclass(frozen=True)
class Change:
    """A model `place/local` of two shards and a manifest in directory `home`, and two deltas that follow it."""

    home: Path

    @property
    def place(self) -> Path:
        return self.home / "place"

    @cached_property
    def old(self) -> Tree:
        """Return what is there before; writes the deltas too."""
        states = [policy(torch.float32)]
        for seed in (1, 2):
            states.append(step(states[-1], seed))
        saved = [as_hf(self.home / f"policy-{i}", state) for i, state in enumerate(states)]
        for i, (base, new) in enumerate(pairwise(saved)):
            ended = serve().run(
                "ckptkit", ["delta", str(base), str(new), str(self.home / "deltas" / str(i)), "--force"]
            )
            assert ended.code == 0, ended
        ckptkit.consolidate(saved[0], self.place / "local", max_shard_size=2600)
        return read_tree(self.place)

    @cached_property
    def new(self) -> Tree:
        """Return what is there after a change that nothing came to."""
        self.lay()
        ended = self.run()
        assert ended.code == 0, ended
        expected, found = load(self.home / "policy-2"), load(self.place / "local")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        return read_tree(self.place)

    def lay(self) -> None:
        """Put the model as it is before."""
        put(self.old, self.place)

    def run(self, fault: Fault | None = None) -> Ended:
        """Change the model in place."""
        words = ["apply", str(self.place / "local"), str(self.home / "deltas"), "--in-place"]
        return serve().run("ckptkit", words, fault=fault)

    def judge(self) -> tuple[Verdict, str]:
        """Return what became of the model, what `verify` says of it, and what the same command makes of it."""
        tree = read_tree(self.place)
        verified = serve().run("ckptkit", ["verify", str(self.place / "local")])
        if "local/.ckptkit-delta/" in tree:
            seen, is_told = "to be completed", verified.code == 1 and "was interrupted" in verified.out
        else:
            known = {"old": self.old, "new": self.new}
            seen = next((name for name, one in known.items() if model_in(one) == model_in(tree)), "neither")
            is_told = verified.code == 0
        seen = f"{seen}, verify: code {verified.code}"
        if seen.startswith("neither"):
            return Verdict.LOST, seen
        if not is_told:
            return Verdict.SILENT, f"{seen}: {verified.out}{verified.err}"
        again = self.run()
        if again.code or read_tree(self.place) != self.new:
            left = sorted(name for name in read_tree(self.place) if is_hidden(name))
            return Verdict.HALF, f"{seen}; run again: code {again.code}, left {left}: {again.err}"
        return Verdict.RIGHT, seen


def is_hidden(name: str) -> bool:
    """Return whether a path belongs to a journal, or to a call that died."""
    return any(part.startswith(".") for part in name.split("/"))


def model_in(tree: Tree) -> Tree:
    """Return what engines read."""
    return {name: content for name, content in tree.items() if not is_hidden(name)}


def try_changing(place: Path, whole: bool) -> Iterator[Seen]:
    """Let crashes come to every call of a change, errors to some, and let the power go after some of its writes."""
    change = Change(place)
    for trouble in TROUBLES:
        many = None if trouble.crashes else _MANY
        yield from try_trouble(change, trouble, many if whole else _FEW)
    lefts = list(outages(change))
    for at in spread(len(lefts), 3 * _MANY if whole else _FEW):
        put(lefts[at - 1], change.place)
        verdict, seen = change.judge()
        yield Seen("ckptkit apply --in-place", verdict, f"power gone, state {at} of {len(lefts)}: {seen}")


def try_trouble(change: Change, trouble: Trouble, most: int | None) -> Iterator[Seen]:
    """Let a trouble come to every call of a change, or to at most `most` of them."""
    assert change.new != change.old
    fault = Fault(str(change.place), kind=trouble.kind, number=trouble.number, calls=trouble.calls)
    change.lay()
    total = change.run(replace(fault, kind="nothing", forever=True)).fired
    for at in spread(total, most):
        change.lay()
        ended = change.run(replace(fault, at=at, forever=trouble.forever))
        is_new = read_tree(change.place) == change.new
        verdict, seen = change.judge()
        if verdict is Verdict.RIGHT and not trouble.crashes:
            verdict = judge_words(change, trouble, ended, is_new=is_new)
        what = f"{trouble.name} at call {at} of {total}, {ended.where.replace(f'{change.place}/', '')}: "
        yield Seen(
            "ckptkit apply --in-place",
            verdict if ended.fired else Verdict.UNFIRED,
            f"{what}code {ended.code}, {seen}: {ended.err.strip()}",
        )


def judge_words(change: Change, trouble: Trouble, ended: Ended, *, is_new: bool) -> Verdict:
    """Return whether a change that lived said what became of it."""
    if ended.code == 0:
        return Verdict.RIGHT if is_new else Verdict.SILENT
    return Verdict.UNNAMED if trouble.is_harmless else judge_error(ended, [str(change.place)])


def outages(change: Change) -> Iterator[Tree]:
    """Yield each state that may be on the disk after the power went, once."""
    change.lay()
    disk = Disk(change.place)
    with tempfile.TemporaryDirectory() as home:
        journal = Path(home, "journal")
        ended = change.run(Fault(str(change.place), kind="journal", forever=True, other=str(journal)))
        assert ended.code == 0, ended
        changes = list(read_journal(journal))
    seen: list[Tree] = []
    for done in changes:
        disk.apply(done)
        for left in disk.left():
            if left not in seen:
                seen.append(left)
                yield left


CASES = (Case("64", "in-place", "failing calls, crashes and power loss", try_changing),)
