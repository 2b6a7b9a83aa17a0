"""The checkpoints of `ckptkit train`, and of conversions, which have a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.trainers.trainer import Evidence, MetricsFile, TrainerFacts

METRICS = "metrics.json"
TRAINING = "training"  # beside a model in Hugging Face's format: its training state
_OWN = {"step", "model", "optim", "scheduler", "progress"}  # the entries of one save


def find_ckptkit_title(evidence: Evidence) -> str | None:
    """Return ckptkit's title if a manifest names the source, or by the entries and `training/` of a save."""
    source = evidence.read_source()
    if source:
        return f"ckptkit, converted from a `{source.get('format')}` checkpoint"
    is_own = evidence.keys == _OWN or (TRAINING in evidence.files and _OWN - {"model"} <= evidence.keys)
    if is_own:
        return "ckptkit train (FSDP)"
    return "ckptkit.Run" if TRAINING in evidence.files and "step" in evidence.keys else None


def to_float_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items()}


CKPTKIT = TrainerFacts(
    name="ckptkit",
    wrote=find_ckptkit_title,
    steps=("ckpt-([0-9]{1,18})",),
    others=(TRAINING,),
    states=(r"tokens\.(?:bin|json)",),
    of_runs=("train.toml", "metrics.jsonl"),
    metrics={METRICS: MetricsFile(1 << 20, to_float_metrics)},
)
