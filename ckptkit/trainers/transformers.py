"""The checkpoints of transformers' Trainer, and models that transformers saved.

Source: transformers/trainer.py, trainer_callback.py (`TrainerState`), modeling_utils.py (`save_pretrained`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.trainers.trainer import Mark, MetricsFile, TrainerFacts

STATE = "trainer_state.json"
_OF_SPEED = ("_runtime", "_per_second")


def metrics_at_step(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a Trainer logged at the step of its state, without its speed."""
    entries = [entry for entry in state["log_history"] if entry.get("step") == state["global_step"]]
    numbers = {
        str(name): float(value)
        for entry in entries
        for name, value in entry.items()
        if name == "loss" or (name.startswith("eval_") and not name.endswith(_OF_SPEED))
    }
    return {**numbers, "step": float(state["global_step"])} if numbers else {}


TRANSFORMERS = TrainerFacts(
    name="transformers",
    marks=(
        Mark("transformers' Trainer", files=(r"trainer_state\.json",)),
        Mark("transformers", json=("config.json", "transformers_version")),
    ),
    steps=("checkpoint-([0-9]{1,18})",),
    beside={r"optimizer\.pt": "optimizer"},
    step_keys=((STATE, ("global_step",)),),
    best_keys=((STATE, ("best_model_checkpoint",)),),
    own_state=(r"rng_state_([0-9]+)\.pth",),
    optional_state=(r"rng_state_([0-9]+)\.pth",),  # `Trainer._load_rng_state` continues without it
    states=(r"trainer_state\.json|training_args\.bin|scheduler\.pt|rng_state\.pth",),
    metrics={STATE: MetricsFile(1 << 26, metrics_at_step)},  # it has an entry for every logging step
)
