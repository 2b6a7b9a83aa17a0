"""Decide by steps and metrics which checkpoints of a run to keep, with the reasons."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

from ckptkit.adapters.config import NAME as ADAPTER_CONFIG
from ckptkit.adapters.config import parse_adapter_config
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.checkpoints.other_kinds import find_kind_by_files
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Corrupt, Unsafe, Unsupported, Usage, hint_on_choices, too_small_error, translate_os_errors
from ckptkit.io.file import list_directories, names_in, read_small
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import is_remote
from ckptkit.runs.run_backend import protections_of
from ckptkit.trainers import checkpoint_sort_key, metrics_files

Dependents = tuple[tuple[str, str], ...]  # the name of an entry of the run, and the reason why it needs the checkpoint


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
    It also stays while one of the entries in `dependents` does.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    holds: tuple[str, ...] = ()
    is_weights_only: bool = False
    dependents: Dependents = ()


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
    newest_first = sorted(checkpoints, key=lambda saved: checkpoint_sort_key(saved.step, saved.path.name), reverse=True)
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
    return keep_referenced_checkpoints(verdicts)


def keep_referenced_checkpoints(verdicts: list[Verdict]) -> list[Verdict]:
    """Return the decisions, but keep every checkpoint that another kept entry of the run reads."""
    going = {verdict.saved.path.name for verdict in verdicts if not verdict.is_kept}
    read = {
        verdict.saved.path.name: tuple(reason for name, reason in verdict.saved.dependents if name not in going)
        for verdict in verdicts
        if not verdict.is_kept
    }
    if not any(read.values()):
        return verdicts
    kept = [replace(verdict, reasons=read.get(verdict.saved.path.name, verdict.reasons)) for verdict in verdicts]
    return keep_referenced_checkpoints(kept)  # these may read older ones


def best_checkpoints_by(newest_first: Iterable[SavedCheckpoint], best: Best) -> list[SavedCheckpoint]:
    """Return the best checkpoints by a finite metric; between equal values, prefers the newer checkpoint."""
    measured = [saved for saved in newest_first if math.isfinite(saved.metrics.get(best.metric, math.nan))]
    return sorted(measured, key=lambda saved: saved.metrics[best.metric] * (-1 if best.highest else 1))[: best.count]


def require_known_metric(root: Path, complete: Sequence[SavedCheckpoint], policy: Policy) -> None:
    """Raise `Usage` if no checkpoint has the metric of `best`, because a typo would delete all but the newest."""
    if policy.best and complete and not best_checkpoints_by(complete, policy.best):
        known = sorted({name for saved in complete for name in saved.metrics} - {"step"})
        hint = hint_on_choices(known) if known else "drop --keep-best, or save checkpoints with metrics"
        raise Usage(f"no checkpoint has a finite metric `{policy.best.metric}`", path=root, hint=hint)


def saved_checkpoints_of(run: RunFolder) -> list[SavedCheckpoint]:
    """Return the complete checkpoints that `Run.save` wrote: without links, other names, and weights-only ones."""
    dependents = dependents_by_checkpoint(run.root)
    return [
        SavedCheckpoint(
            checkpoint.path,
            step,
            read_metrics(checkpoint.path),
            protections_of(checkpoint.path),
            dependents=dependents.get(checkpoint.path.name, ()),
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


def dependents_by_checkpoint(root: Path) -> Mapping[str, Dependents]:
    """Return, by the name of each directory of the run at `root`, the entries of the run that read it.

    Does not look at links in the run itself, which are trackers, and at hidden directories.
    """
    dependents: dict[str, dict[str, str]] = defaultdict(dict)
    directories = local_paths_of(root)
    for entry in (entry for directory in directories for entry in list_directories(directory)):
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        for path in links_and_base_records(entry):
            name = str(path.relative_to(entry.parent))
            if path.is_symlink():
                target = Path(os.path.realpath(path))
                reads = find_run_entry_containing(target, directories)
                reason = f"`{name}` links {'to' if target.name == reads else 'into'} it"
            else:
                reads = find_base_entry(path, directories)
                what = "adapter" if path.name == ADAPTER_CONFIG else "delta"
                reason = f"the {what} in `{path.parent.relative_to(entry.parent)}` has it as its base"
            if reads not in (None, entry.name):
                dependents[str(reads)].setdefault(entry.name, reason)
    return {name: tuple(sorted(by_entry.items())) for name, by_entry in dependents.items()}


def links_and_base_records(directory: Path) -> Iterator[Path]:
    """Yield the links, adapter configs and manifests of deltas below a directory, without following links.

    In a store, which has no links, yields only the files in the directory itself.
    """
    if is_remote(directory):
        yield from (directory / name for name in base_records_among(names_in(directory)))
        return
    pending = [directory]
    while pending:
        with translate_os_errors(directory):
            try:
                with os.scandir(pending.pop()) as scanned:  # faster than an `lstat` of thousands of shards
                    entries = sorted(scanned, key=lambda entry: entry.name)
            except (FileNotFoundError, PermissionError):  # deleted meanwhile, or another user's
                continue
        records = base_records_among(entry.name for entry in entries)
        yield from (Path(entry) for entry in entries if entry.is_symlink() or entry.name in records)
        pending += (Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False))


def base_records_among(names: Iterable[str]) -> set[str]:
    """Return the names of files that record the base of an adapter or a delta."""
    names = frozenset(names)
    return {name for name in names if name == ADAPTER_CONFIG or (name == MANIFEST and find_kind_by_files(names))}


def find_run_entry_containing(path: Path, directories: Sequence[Path]) -> str | None:
    """Return the entry of the run in `directories` that is at a path or contains it, None without."""
    for root in (directory.resolve() for directory in directories):
        if root in path.parents:
            return path.relative_to(root).parts[0]
    return None


def find_base_entry(record: Path, directories: Sequence[Path]) -> str | None:
    """Return the entry of the run that an adapter's config or a delta's manifest names as the base, None without.

    The file has the path that the user passed. It may be relative to any directory, or of another mount, so the names
    of the run and of the entry decide.
    """
    try:
        if record.name == ADAPTER_CONFIG:
            base = parse_adapter_config(record).base
        else:
            manifest = read_manifest(record.parent)
            base = (manifest.source or {}).get("base") if manifest else None
    except (Corrupt, Unsafe, Unsupported):
        return None
    if base is None:
        return None
    if inside := find_run_entry_containing(Path(os.path.realpath(base)), directories):
        return inside
    parts = PurePosixPath(os.path.normpath(base.replace("\\", "/"))).parts
    for directory in directories:
        at = [i for i, part in enumerate(parts) if (directory / part).is_dir() and part not in ("/", "..")]
        if at and (at[0] == 0 or parts[at[0] - 1] in (directory.resolve().name, "..")):
            return parts[at[0]]
    return None
