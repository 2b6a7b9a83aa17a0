"""Read the metrics of a run. They are downsampled while they are read, because a log may have millions of lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.io.file import opening, read_at, read_small
from ckptkit.io.progress import BytesDone
from ckptkit.runs.ls import Listed
from ckptkit.words import format_brief

_MOST = 500  # segments per metric, each drawn with minimum, maximum and mean
_GAP = 8  # the line is broken at a gap of this many times the previous distance
_MOST_BAD = 100
_MOST_BREAKS = 100  # more breaks are ignored, or the line would consist of breaks


@dataclass(slots=True)
class Segment:
    """The values of consecutive steps. The line is broken before them if `starts_gap`."""

    first: float
    last: float
    low: float
    high: float
    total: float
    count: int
    starts_gap: bool

    @property
    def mean(self) -> float:
        return self.total / self.count

    def merge_later(self, later: Segment) -> None:
        self.last = later.last
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.count += later.count


@dataclass(slots=True)
class Series:
    """The values of one metric. `bad` are the first steps with NaN or infinity, `bad_count` counts all of them."""

    name: str
    stretches: list[Segment] = field(default_factory=list)
    bad: list[float] = field(default_factory=list)
    bad_count: int = 0
    latest: float | None = None
    _width: int = 1  # values per segment
    _stride: float = 0.0  # distance of the last two steps
    _is_broken: bool = False
    _breaks: int = 0

    def add_value(self, step: float, value: float) -> None:
        """Add the value at a step.

        If the run went back to an earlier step, all values from that step on are dropped.
        """
        if not self.stretches or step <= self.stretches[-1].last:
            while self.stretches and self.stretches[-1].first >= step:
                self.stretches.pop()
            while self.bad and self.bad[-1] >= step:
                self.bad.pop()
                self.bad_count -= 1
        if not math.isfinite(value):
            self.bad_count += 1
            self._is_broken = True
            if len(self.bad) < _MOST_BAD:
                self.bad.append(step)
            return
        self.latest = value
        segment = Segment(step, step, value, value, value, 1, self._record_break_before(step))
        if not segment.starts_gap and self.stretches[-1].count < self._width:
            self.stretches[-1].merge_later(segment)
            return
        self.stretches.append(segment)
        if len(self.stretches) > 2 * _MOST:
            for earlier, later in zip(self.stretches[::2], self.stretches[1::2], strict=False):
                earlier.merge_later(later)
            self.stretches = self.stretches[::2]
            self._width *= 2

    def _record_break_before(self, step: float) -> bool:
        if not self.stretches:
            return True
        distance = step - self.stretches[-1].last
        is_gap = 0 < self._stride * _GAP < distance
        self._stride = distance
        is_broken, self._is_broken = self._is_broken or is_gap, False
        self._breaks += is_broken
        return is_broken and self._breaks <= _MOST_BREAKS

    @property
    def low(self) -> float:
        return min(stretch.low for stretch in self.stretches)

    @property
    def high(self) -> float:
        return max(stretch.high for stretch in self.stretches)

    def format_value_at(self, step: float) -> str:
        """Return the mean of the segment that contains a step, as text; "" if there is none."""
        means = (segment.mean for segment in self.stretches if segment.first <= step <= segment.last)
        return next(map(format_brief, means), "")


METRICS = "metrics.jsonl"  # written by ckptkit's training loop: one JSON line per step
TRAINER_STATE = "trainer_state.json"  # of transformers' Trainer, in each of its checkpoints
_BLOCK = 1 << 20  # bytes read at once
_LONGEST = 1 << 16  # bytes of a line; a longer line cannot be metrics
_STATE_LIMIT = 1 << 28  # bytes
_MOST_SERIES = 64
_MOST_RESUMED = 50

_ALSO_CALLED = {
    "learning_rate": "lr",
    "train_loss": "loss",
    "val_loss": "eval_loss",
    "train_tokens_per_second": "tokens_per_second",
}


@dataclass(slots=True)
class History:
    """The metrics of a run. `source` is where they come from; `skipped` counts lines without metrics.

    `resumed` are the steps to which the run went back.
    """

    source: str = ""
    series: dict[str, Series] = field(default_factory=dict)
    last_step: float | None = None
    skipped: int = 0
    resumed: list[float] = field(default_factory=list)

    def add_log_entry(self, entry: object) -> None:
        """Add the metrics of one step. An entry without a step counts as skipped."""
        step = to_float(entry.get("step")) if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or step is None or not math.isfinite(step):
            self.skipped += 1
            return
        if self.last_step is not None and step < self.last_step:
            self.resumed = [*[at for at in self.resumed if at < step][-_MOST_RESUMED:], step]
        self.last_step = step
        for name, value in entry.items():
            converted, key = to_float(value), str(_ALSO_CALLED.get(name, name))
            has_room = key in self.series or len(self.series) < _MOST_SERIES
            if converted is not None and name != "step" and has_room:
                self.series.setdefault(key, Series(key)).add_value(step, converted)

    def drawable_series(self, *names: str) -> list[Series]:
        """Return the metrics of these names that have values to draw."""
        return [self.series[name] for name in names if name in self.series and self.series[name].stretches]


def to_float(value: object) -> float | None:
    """Return a JSON number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_history(root: Path, checkpoints: Iterable[Listed], progress: BytesDone | None = None) -> History:
    """Read the run's metrics.jsonl, or else the Trainer state, or else the metrics in the checkpoints."""
    if (root / METRICS).is_file():
        return read_metrics_jsonl(root / METRICS, progress)
    listed = list(checkpoints)
    states = [checkpoint.path / TRAINER_STATE for checkpoint in reversed(listed) if checkpoint.path.is_dir()]
    path = next((path for path in [root / TRAINER_STATE, *states] if path.is_file()), None)
    if path is not None:  # a damaged file has no entries
        history = History(f"{path.parent.name}/{path.name}")
        state = parse_json_or_none(read_small(path, _STATE_LIMIT))
        entries = state.get("log_history") if isinstance(state, Mapping) else None
        for entry in entries if isinstance(entries, list) else []:
            history.add_log_entry(entry)
        return history
    history = History("the checkpoints' own metrics")
    for checkpoint in listed:
        if checkpoint.step is not None and checkpoint.metrics:
            history.add_log_entry({**checkpoint.metrics, "step": checkpoint.step})
    return history


def read_metrics_jsonl(path: Path, progress: BytesDone | None = None) -> History:
    """Read a file of JSON lines, up to the last complete line. A line that is too long counts as skipped."""
    history, rest = History(path.name), b""
    with opening(path) as file:
        size = file.size
        for offset in range(0, size, _BLOCK):
            block = read_at(file, min(_BLOCK, size - offset), offset)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                history.add_log_entry(parse_json_or_none(line) if len(line) < _LONGEST else None)
            rest = rest[-_LONGEST:]
            if progress:
                progress(len(block))
    return history


def parse_json_or_none(line: bytes) -> Any:
    """Return the value of a JSON text; None for invalid JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
