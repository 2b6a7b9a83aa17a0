"""The checkpoints of `ckptkit train`, and of conversions, which their manifest tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.trainers.trainer import Evidence, MetricsFile, TrainerFacts

METRICS = "metrics.json"
TRAINING = "training"  # beside a model in Hugging Face's format: the rest of its checkpoint
_OWN = {"step", "model", "optim", "scheduler", "progress"}  # saved all together


def wrote(seen: Evidence) -> str | None:
    """Return our name if the manifest says of what this was made, or all is here that our training loop saves."""
    source = seen.read_source()
    if source:
        return f"ckptkit, of a `{source.get('format')}` checkpoint"
    is_own = seen.keys == _OWN or (TRAINING in seen.files and _OWN - {"model"} <= seen.keys)
    return "ckptkit train (FSDP)" if is_own else None


def to_numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in found.items()}


CKPTKIT = TrainerFacts(
    name="ckptkit",
    wrote=wrote,
    steps=("ckpt-([0-9]{1,18})",),
    others=(TRAINING,),
    of_runs=("train.toml", "metrics.jsonl"),
    metrics={METRICS: MetricsFile(1 << 20, to_numbers)},
)
