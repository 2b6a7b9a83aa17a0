"""Retention: which checkpoints of a run stay, each for a reason, and how the others go. Counts, no windows of time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptkit.errors import Corrupt, Usage, translate_os_errors
from ckptkit.files import read_small
from ckptkit.runs import Run
from ckptkit.staging import remove

METRICS = "metrics.json"
_LIMIT = 1 << 20  # bytes of a file of metrics
_LEAVING = ".leaving"  # ends the hidden name of a checkpoint that is being deleted


@dataclass(frozen=True, slots=True)
class Best:
    """The `count` checkpoints with the lowest or the highest `metric` are kept."""

    metric: str
    highest: bool = False
    count: int = 1

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
            raise Usage(f"`{text}` does not say which checkpoints are the best", hint=hint)
        return cls(metric, highest, int(count))


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept: the newest `last` checkpoints and the `best` ones; all of them where `last` is None."""

    last: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise Usage(f"keep_last is {self.last}; the newest checkpoint is never deleted")
        if self.last is None and self.best is not None:
            hint = "say with `keep_last` how many others stay"
            raise Usage("keep_best alone deletes nothing: every checkpoint is kept", hint=hint)


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint of a run: its directory, its step and what was measured then."""

    path: Path
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a checkpoint: it is deleted unless there are `reasons` to keep it."""

    saved: Saved
    reasons: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """True if there is a reason to."""
        return bool(self.reasons)


def decide(checkpoints: Iterable[Saved], policy: Policy) -> list[Verdict]:
    """What becomes of each of the checkpoints, newest first. The newest is always kept, and so is the best."""
    newest_first = sorted(checkpoints, key=lambda saved: saved.step, reverse=True)
    reasons: dict[Path, list[str]] = {saved.path: [] for saved in newest_first}
    for saved in newest_first[: policy.last]:
        reasons[saved.path].append("all are kept" if policy.last is None else f"one of the last {policy.last}")
    if policy.best is not None:
        for saved in best_of(newest_first, policy.best):
            reasons[saved.path].append(f"{policy.best.metric} {saved.metrics[policy.best.metric]:g} is among the best")
    return [Verdict(saved, tuple(reasons[saved.path])) for saved in newest_first]


def best_of(newest_first: Iterable[Saved], best: Best) -> list[Saved]:
    """The best by a metric, and of equal ones the newer. NaN, infinity and no metric at all are never best."""
    measured = [saved for saved in newest_first if math.isfinite(saved.metrics.get(best.metric, math.nan))]
    return sorted(measured, key=lambda saved: saved.metrics[best.metric] * (-1 if best.highest else 1))[: best.count]


def find_saved(run: Run) -> list[Saved]:
    """The complete checkpoints of a run that are its own: named as it names them, and no links."""
    return [
        Saved(found.path, found.step, read_metrics(found.path))
        for found in run.checkpoints()
        if found.path == run.checkpoint(found.step) and not found.path.is_symlink()
    ]


def write_metrics(step: int, metrics: Mapping[str, float]) -> bytes:
    """The file that keeps what was measured at a step beside the checkpoint."""
    numbers = {name: float(value) for name, value in metrics.items()}
    return json.dumps({**numbers, "step": step}, indent=1).encode()


def read_metrics(checkpoint: Path) -> dict[str, float]:
    """What was measured when a checkpoint was saved; nothing if it does not say. Raises `Corrupt`."""
    path = checkpoint / METRICS
    if not path.exists():
        return {}
    try:
        found = json.loads(read_small(path, _LIMIT))
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise Corrupt("not the metrics of a checkpoint", path=path, hint="remove the file") from error


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint: out of sight in one step, and then from the disk."""
    hidden = checkpoint.with_name(f".{checkpoint.name}{_LEAVING}")
    with translate_os_errors(checkpoint):
        if hidden.exists():  # whoever began to delete it was ended
            remove(hidden)
        os.rename(checkpoint, hidden)
        remove(hidden)


def finish_deleting(root: Path) -> None:
    """Remove what is left of checkpoints that were being deleted when the process was ended."""
    with translate_os_errors(root):
        for hidden in root.glob(f".ckpt-*{_LEAVING}"):
            remove(hidden)
