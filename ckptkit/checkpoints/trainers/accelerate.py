"""Know the checkpoints of Hugging Face Accelerate.

Source: accelerate/utils/{constants,fsdp_utils}.py, `save_fsdp_model` and `save_fsdp_optimizer`.
"""

from __future__ import annotations

import re

from ckptkit.checkpoints.trainers.trainer import Evidence, Trainer

_PLACE = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[0-9]+|pytorch_model_fsdp(?:_[0-9]+)?\.bin")
_BY_RANK = r"pytorch_model_fsdp(?:_[0-9]+)?_rank[0-9]+\.bin"


def wrote(seen: Evidence) -> str | None:
    """Return the name by what Accelerate calls models and optimizers, and by the state that a Trainer leaves beside."""
    by_rank = seen.has_file(_BY_RANK)
    if not (by_rank or _PLACE.fullmatch(seen.place.name)):
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
    unread={_BY_RANK: "a file of torch.save for each rank, as Accelerate saves without DCP"},
)
