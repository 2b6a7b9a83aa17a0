"""Prunes: runs in which not every directory is a checkpoint to count on, and clocks that lie. Cases 57 and 59."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.bad_inputs import METADATA
from tests.faults.cases import Case, Seen
from tests.faults.damage import cut, remove, write
from tests.faults.originals import original
from tests.faults.trials import server
from tests.faults.verdicts import Verdict, judge_error

_SHARD = "__1_0.distcp"


@dataclass(frozen=True, slots=True)
class Run:
    """Copies of a checkpoint by name, and what was done to each; which of them must be left of what is asked for."""

    name: str
    folders: Mapping[str, Callable[[Path], object]]
    asked: str
    left: frozenset[str]


def sound(_: Path) -> None:
    """Nothing."""


def dated(seconds: int, root: Path) -> None:
    """Be last changed at some time, or in the future."""
    for path in (*root.iterdir(), root):
        os.utime(path, (seconds, seconds))


def linked(root: Path) -> None:
    """Be a link to a checkpoint that lies elsewhere."""
    away = root.parent.parent / "elsewhere"
    root.rename(away)
    root.symlink_to(away)


def foreign(root: Path) -> None:
    """Hold what is no checkpoint."""
    shutil.rmtree(root)
    root.mkdir()
    (root / "notes.txt").write_text("ours\n")


PARTIAL, CUT, SHORT = remove(METADATA), cut(_SHARD, 0.5), remove(_SHARD)
GARBAGE = write(METADATA, b"garbage")
OLD, NEW = partial(dated, 1_000_000_000), partial(dated, 4_000_000_000)
WORSE = {"ckpt-4": PARTIAL, "ckpt-5": CUT, "ckpt-6": SHORT, "ckpt-7": GARBAGE, "ckpt-8": foreign, "notes": foreign}
SOUND = {f"ckpt-{step}": sound for step in (1, 2, 3)}

RUNS = {
    "57": (
        Run("worse ones are newer", {**SOUND, **WORSE}, "--keep-last 2", frozenset({"ckpt-2", "ckpt-3", *WORSE})),
        Run("one is good", {"ckpt-1": sound, **WORSE}, "--keep-last 1", frozenset({"ckpt-1", *WORSE})),
        Run("a link", {**SOUND, "ckpt-9": linked}, "--keep-last 1", frozenset({"ckpt-3", "ckpt-9"})),
        Run("none is good", WORSE, "--keep-last 1", frozenset(WORSE)),
    ),
    "59": (
        Run("the oldest is the newest", {"ckpt-2": NEW, "ckpt-10": OLD}, "--keep-last 1", frozenset({"ckpt-10"})),
        Run("all of one time", {"ckpt-9": OLD, "ckpt-10": OLD}, "--keep-last 1", frozenset({"ckpt-10"})),
    ),
}


def prune(runs: tuple[Run, ...], place: Path, _: bool) -> Iterator[Seen]:
    """Ask what would be deleted, which deletes nothing, and then delete."""
    for i, run in enumerate(runs):
        root = place / str(i) / "run"
        root.mkdir(parents=True)
        for name, damage in run.folders.items():
            shutil.copytree(original("dcp").root, root / name)
            damage(root / name)
        for words, left in (((), frozenset(run.folders)), (("--yes",), run.left)):
            ended = server(is_ours=True).run("ckptkit", ["prune", str(root), *run.asked.split(), *words])
            is_kept = all((root / name).exists() for name in run.left)
            verdict = Verdict.RIGHT if {path.name for path in root.iterdir()} == left else Verdict.SILENT
            if ended.code:
                verdict = judge_error(ended, ("run", "ckpt-"))
            yield Seen("ckptkit prune", verdict if is_kept else Verdict.LOST, f"{run.name} {' '.join(words)}")


CASES: tuple[Case, ...] = (
    Case("57", "prune", "partial, damaged and foreign directories among the checkpoints", partial(prune, RUNS["57"])),
    Case("59", "prune", "clocks that lie", partial(prune, RUNS["59"])),
)
