"""Know the names of DeepSpeed's checkpoints.

Source: deepspeed/runtime/engine.py: `global_stepN` with the states of models and optimizers by rank, and `latest`, a
file with the name of the directory that is meant. transformers' Trainer puts both into its own `checkpoint-N`.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_FILE = r"(?:(?:bf16_|fp16_)?zero_pp_rank_[0-9]+_)?mp_rank_[0-9]{2,}_(?:model|optim)_states\.pt"
_STEP = "global_step([0-9]{1,18})"


def wrote(seen: Evidence) -> str | None:
    """Return the name by what the files of ranks are called, and by the state that a Trainer leaves beside."""
    if not (seen.has_file(_FILE) or "latest_universal" in seen.files):
        return None
    has_trainer = (seen.place.parent / "trainer_state.json").exists()
    return "DeepSpeed, by transformers' Trainer" if has_trainer else "DeepSpeed"


DEEPSPEED = Trainer(
    name="deepspeed",
    wrote=wrote,
    steps=(_STEP, f"{_STEP}_universal"),
    wholes=(_STEP,),
    trackers=("latest",),
    ranks=(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_[0-9]{2}_(?:model|optim)_states\.pt",),
)
