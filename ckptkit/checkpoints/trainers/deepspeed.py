"""Know the names of DeepSpeed's checkpoints.

Source: deepspeed/runtime/engine.py: `global_stepN` with the states of models and optimizers by rank, and `latest`, a
file with the name of the directory that is meant.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Trainer

_RANK = r"(?:bf16_)?(?:zero_pp_rank_[0-9]+_)?mp_rank_[0-9]{2}"

DEEPSPEED = Trainer(
    name="deepspeed",
    steps=("global_step([0-9]{1,18})",),
    trackers=("latest",),
    ranks=(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_[0-9]{2}_(?:model|optim)_states\.pt",),
    unread={rf"{_RANK}_(?:model|optim)_states\.pt": "files of torch.save by rank, as DeepSpeed saves"},
)
