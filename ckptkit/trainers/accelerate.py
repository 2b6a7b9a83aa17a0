"""Know the checkpoints of Hugging Face Accelerate.

Source: accelerate/utils/{constants,fsdp_utils}.py, `save_fsdp_model` and `save_fsdp_optimizer`.
"""

from __future__ import annotations

import re

from ckptkit.trainers.trainer import Evidence, Trainer

_PLACE = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[0-9]+|pytorch_model_fsdp(?:_[0-9]+)?\.bin")
_ENGINE = re.compile(r"pytorch_model(?:_[0-9]+)?")  # what `save_state` calls the tag of an engine's checkpoint
_BY_ENGINE = r"(?:zero_pp_rank_[0-9]+_)?mp_rank_[0-9]+_model_states\.pt"
_BY_RANK = r"pytorch_model_fsdp(?:_[0-9]+)?_rank[0-9]+\.bin"


def wrote(seen: Evidence) -> str | None:
    """Return the name by what Accelerate calls models and optimizers, and by the state that a Trainer leaves beside."""
    by_rank = seen.has_file(_BY_RANK)
    by_engine = _ENGINE.fullmatch(seen.place.name) and seen.has_file(_BY_ENGINE)
    if not (by_rank or by_engine or _PLACE.fullmatch(seen.place.name)):
        return None
    above = seen.place if by_rank else seen.place.parent
    has_trainer = (above / "trainer_state.json").exists()
    return "Accelerate, by transformers' Trainer" if has_trainer else "Accelerate"


ACCELERATE = Trainer(
    name="accelerate",
    wrote=wrote,
    others=("optimizer_[0-9]+",),
    beside={r"optimizer\.bin": "optimizer"},  # of `save_state` without shards
    ranks=(r"(?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?_rank([0-9]+)\.bin",),
    own_state=(r"random_states_([0-9]+)\.pkl",),
)
