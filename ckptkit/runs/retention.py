"""Decide which checkpoints of a run are kept, each for a reason, by their steps and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Corrupt, Usage
from ckptkit.io.file import read_small
from ckptkit.runs.keeper import find_holds
from ckptkit.trainers import metrics_files


@dataclass(frozen=True, slots=True)
class Best:
    """The rule that keeps the `count` checkpoints with the lowest `metric`, or with the highest."""

    metric: str
    highest: bool = False
    count: int = 1

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}:{self.count}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read METRIC[:min|max][:N]. Raises `Usage` if `text` is not that."""
        metric, *rest = text.split(":")
        highest = rest[:1] == ["max"]
        if rest[:1] in (["min"], ["max"]):
            rest = rest[1:]
        count = rest[0] if rest else "1"
        if not metric or len(rest) > 1 or not count.isdecimal() or int(count) < 1:
            hint = "write METRIC[:min|max][:N], as in `loss`, `loss:3` or `accuracy:max:2`"
            raise Usage(f"expected METRIC[:min|max][:N], found `{text}`", hint=hint)
        return cls(metric, highest, int(count))


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that keep checkpoints beside the newest: the `last` steps, multiples of `every`, and the `best`.

    A policy without any rule keeps all checkpoints.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        for name, number in (("keep_last", self.last), ("keep_every", self.every)):
            if number is not None and number < 1:
                raise Usage(f"`{name}`: expected at least 1, found {number}")

    @property
    def keeps_all(self) -> bool:
        """Return whether nothing is ever deleted."""
        return self == Policy()


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of a run: its directory, its step, and the metrics that were saved with it.

    `holds` are reasons to keep it that no rule overrides. A training cannot resume from one that `is_weights_only`.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    holds: tuple[str, ...] = ()
    is_weights_only: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a checkpoint: it is deleted unless there are `reasons` to keep it."""

    saved: SavedCheckpoint
    reasons: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        return bool(self.reasons)


def decide(checkpoints: Iterable[SavedCheckpoint], policy: Policy) -> list[Verdict]:
    """Return the decision on each checkpoint, newest first. The newest that can be resumed from is always kept."""
    newest_first = sorted(checkpoints, key=lambda saved: (saved.step, saved.path.name), reverse=True)
    best = best_of(newest_first, policy.best) if policy.best else []
    return [Verdict(saved, tuple(reasons_for(saved, newest_first, best, policy))) for saved in newest_first]


def reasons_for(
    saved: SavedCheckpoint, newest_first: Sequence[SavedCheckpoint], best: Sequence[SavedCheckpoint], policy: Policy
) -> Iterator[str]:
    """Yield why a checkpoint is kept, given all checkpoints and the best."""
    yield from saved.holds
    steps = list(dict.fromkeys(one.step for one in newest_first))
    whole = [one.step for one in newest_first if not one.is_weights_only]
    if policy.keeps_all:
        yield "all are kept"
    elif policy.last and saved.step in steps[: policy.last]:
        yield f"one of the last {policy.last}"
    elif saved.step in (steps[0], *whole[:1]):
        yield "the newest" if saved.step == steps[0] else "the newest to go on from"
    if policy.every and saved.step % policy.every == 0:
        yield f"a multiple of {policy.every}"
    if policy.best and saved in best:
        yield f"{policy.best.metric} {saved.metrics[policy.best.metric]:g} is among the best"


def best_of(newest_first: Iterable[SavedCheckpoint], best: Best) -> list[SavedCheckpoint]:
    """Return the best checkpoints by a metric; of equal ones the newer.

    A checkpoint whose metric is missing, NaN or infinite is never among them.
    """
    measured = [saved for saved in newest_first if math.isfinite(saved.metrics.get(best.metric, math.nan))]
    return sorted(measured, key=lambda saved: saved.metrics[best.metric] * (-1 if best.highest else 1))[: best.count]


def check_metric(root: Path, complete: Sequence[SavedCheckpoint], policy: Policy) -> None:
    """Raise `Usage` if no checkpoint has the metric of the best: a typo would cost all but the newest."""
    if policy.best and complete and not best_of(complete, policy.best):
        known = sorted({name for saved in complete for name in saved.metrics} - {"step"})
        hint = f"use one of {', '.join(known)}" if known else "none of them has any"
        raise Usage(f"no checkpoint has a finite metric `{policy.best.metric}`", path=root, hint=hint)


def find_saved(run: RunFolder) -> list[SavedCheckpoint]:
    """Return the complete checkpoints that the run saved itself: no links, no other names, not only weights."""
    return [
        SavedCheckpoint(found.path, step, read_metrics(found.path), find_holds(found.path))
        for found in run.checkpoints()
        if (step := found.own_step) is not None and found.path == run.checkpoint(step)
        if not found.path.is_symlink() and not found.is_weights_only
    ]


def write_metrics(step: int, metrics: Mapping[str, float]) -> bytes:
    """Return the content of the file that keeps the metrics of a step beside the checkpoint."""
    try:
        numbers = {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise Usage(f"`metrics`: expected numbers by name, found {dict(metrics)}") from error
    return json.dumps({**numbers, "step": step}, indent=1).encode()


def read_metrics(checkpoint: Path) -> dict[str, float]:
    """Return the metrics that a trainer saved with a checkpoint, {} if there are none. Raises `Corrupt`."""
    for name, file in metrics_files().items():
        path = checkpoint / name
        if not path.exists():
            continue
        try:
            return file.understand(json.loads(read_small(path, file.limit)))
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise Corrupt("not the metrics of a checkpoint", path=path, hint="remove the file") from error
    return {}
