"""Know the names of DeepSpeed's checkpoints.

Source: deepspeed/runtime/engine.py: `global_stepN` with the states of models and optimizers by rank, and `latest`, a
file with the name of the directory that is meant.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Evidence, Trainer

_BY_RANK = r"(?:bf16_)?zero_pp_rank_[0-9]+_mp_rank_[0-9]{2}_(?:model|optim)_states\.pt"
_BY_TENSOR_RANK = r"mp_rank_[0-9]{2}_model_states\.pt"
_BY_LAYER = r"layer_[0-9]+(?:-model_[0-9]{2}|_expert_[0-9]+_mp_rank_[0-9]{2}|)[-_]model_states\.pt"


def wrote(seen: Evidence) -> str | None:
    """Return the name by what the files of ranks are called."""
    return "DeepSpeed" if seen.has_file(f"{_BY_RANK}|{_BY_TENSOR_RANK}") else None


DEEPSPEED = Trainer(
    name="deepspeed",
    wrote=wrote,
    steps=("global_step([0-9]{1,18})",),
    trackers=("latest",),
    ranks=(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_[0-9]{2}_(?:model|optim)_states\.pt",),
)
