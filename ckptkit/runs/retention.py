"""Decide by steps and metrics which checkpoints of a run to keep, with the reasons."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Corrupt, Usage, choose_from, too_small_error
from ckptkit.io.file import read_small
from ckptkit.runs.keeper import protections_of
from ckptkit.runs.readers import Readers, readers_in
from ckptkit.trainers import metrics_files, run_sort_key


@dataclass(frozen=True, slots=True)
class Best:
    """The rule that keeps the `count` checkpoints with the lowest (or `highest`) value of `metric`."""

    metric: str
    highest: bool = False
    count: int = 1

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}:{self.count}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse METRIC[:min|max][:N]. Raises `Usage` for another syntax.

        The lowest loss is best. Of any other metric, the text must say whether the lowest or the highest is.
        """
        metric, *rest = text.split(":")
        direction = rest.pop(0) if rest[:1] in (["min"], ["max"]) else None
        count = rest[0] if rest else "1"
        if not metric or len(rest) > 1 or not count.isdecimal() or int(count) < 1:
            hint = "write METRIC[:min|max][:N], as in `loss`, `loss:3` or `accuracy:max:2`"
            raise Usage(f"expected METRIC[:min|max][:N], found `{text}`", hint=hint)
        if direction is None and "loss" not in metric.lower():
            message = f"expected whether the lowest or the highest `{metric}` is best, found `{text}`"
            raise Usage(message, hint=f"write `{metric}:max` or `{metric}:min`")
        return cls(metric, direction == "max", int(count))


@dataclass(frozen=True, slots=True)
class Policy:
    """The retention rules: keep the `last` steps, multiples of `every`, and the `best`, always including the newest.

    A policy without any rule keeps all checkpoints.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        for name, number in (("keep_last", self.last), ("keep_every", self.every)):
            if number is not None and number < 1:
                raise too_small_error(name, 1, number)

    @property
    def is_keeping_all(self) -> bool:
        """Return True if the policy has no rule, so that nothing is deleted."""
        return self == Policy()


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of a run: its directory, its step, and its metrics.

    `holds` are reasons to keep it whatever the rules say. `is_weights_only` means that no training can resume from it.
    It also stays while one of the entries in `read_by` does.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    holds: tuple[str, ...] = ()
    is_weights_only: bool = False
    read_by: Readers = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a checkpoint: it is kept if there are `reasons`, else deleted."""

    saved: SavedCheckpoint
    reasons: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        return bool(self.reasons)


def decide_retention(checkpoints: Iterable[SavedCheckpoint], policy: Policy) -> list[Verdict]:
    """Return the decision on each checkpoint, newest first. Always keeps the newest that a training can resume from."""
    newest_first = sorted(checkpoints, key=lambda saved: run_sort_key(saved.step, saved.path.name), reverse=True)
    best = best_checkpoints_by(newest_first, policy.best) if policy.best else []
    steps = list(dict.fromkeys(saved.step for saved in newest_first))
    resumable = [saved.step for saved in newest_first if not saved.is_weights_only]
    verdicts: list[Verdict] = []
    for saved in newest_first:
        reasons = list(saved.holds)
        if policy.is_keeping_all:
            reasons.append("all are kept")
        elif policy.last and saved.step in steps[: policy.last]:
            reasons.append(f"one of the last {policy.last}")
        elif saved.step in (steps[0], *resumable[:1]):
            reasons.append("the newest" if saved.step == steps[0] else "the newest to go on from")
        if policy.every and saved.step % policy.every == 0:
            reasons.append(f"a multiple of {policy.every}")
        if policy.best and saved in best:
            reasons.append(f"{policy.best.metric} {saved.metrics[policy.best.metric]:g} is among the best")
        verdicts.append(Verdict(saved, tuple(reasons)))
    return keep_read_checkpoints(verdicts)


def keep_read_checkpoints(verdicts: list[Verdict]) -> list[Verdict]:
    """Return the decisions, but keep every checkpoint that another kept entry of the run reads."""
    going = {verdict.saved.path.name for verdict in verdicts if not verdict.is_kept}
    read = {
        verdict.saved.path.name: tuple(reason for name, reason in verdict.saved.read_by if name not in going)
        for verdict in verdicts
        if not verdict.is_kept
    }
    if not any(read.values()):
        return verdicts
    kept = [replace(verdict, reasons=read.get(verdict.saved.path.name, verdict.reasons)) for verdict in verdicts]
    return keep_read_checkpoints(kept)  # these may read older ones


def best_checkpoints_by(newest_first: Iterable[SavedCheckpoint], best: Best) -> list[SavedCheckpoint]:
    """Return the best checkpoints by a finite metric; between equal values, prefers the newer checkpoint."""
    measured = [saved for saved in newest_first if math.isfinite(saved.metrics.get(best.metric, math.nan))]
    return sorted(measured, key=lambda saved: saved.metrics[best.metric] * (-1 if best.highest else 1))[: best.count]


def require_known_metric(root: Path, complete: Sequence[SavedCheckpoint], policy: Policy) -> None:
    """Raise `Usage` if no checkpoint has the metric of `best`, because a typo would delete all but the newest."""
    if policy.best and complete and not best_checkpoints_by(complete, policy.best):
        known = sorted({name for saved in complete for name in saved.metrics} - {"step"})
        hint = choose_from(known) if known else "drop --keep-best, or save checkpoints with metrics"
        raise Usage(f"no checkpoint has a finite metric `{policy.best.metric}`", path=root, hint=hint)


def saved_checkpoints_of(run: RunFolder) -> list[SavedCheckpoint]:
    """Return the complete checkpoints that `Run.save` wrote: without links, other names, and weights-only ones."""
    readers = readers_in(run.root)
    return [
        SavedCheckpoint(
            checkpoint.path,
            step,
            read_metrics(checkpoint.path),
            protections_of(checkpoint.path),
            read_by=readers.get(checkpoint.path.name, ()),
        )
        for checkpoint in run.checkpoints()
        if (step := checkpoint.step_in_name) is not None and checkpoint.path == run.checkpoint(step)
        if not checkpoint.path.is_symlink() and not checkpoint.is_weights_only
    ]


def dump_metrics(step: int, metrics: Mapping[str, float]) -> bytes:
    """Return the content of a checkpoint's metrics file. Raises `Usage` for values that are not numbers."""
    try:
        numbers = {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise Usage(f"`metrics`: expected numbers by name, found {dict(metrics)}") from error
    return json.dumps({**numbers, "step": step}, indent=1).encode()


def read_metrics(checkpoint: Path) -> dict[str, float]:
    """Return the metrics that a trainer saved with a checkpoint, {} without metrics. Raises `Corrupt`."""
    for name, file in metrics_files().items():
        path = checkpoint / name
        if not path.exists():
            continue
        try:
            return file.understand(json.loads(read_small(path, file.limit)))
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise Corrupt("not the metrics of a checkpoint", path=path, hint="remove the file") from error
    return {}
