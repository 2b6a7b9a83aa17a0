"""Know the checkpoints of verl.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py: `global_step_N/{actor,critic}` with a file of torch.save for
each rank, and config and tokenizer in `huggingface`.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Evidence, Trainer

_MODEL = r"model_world_size_[0-9]+_rank_[0-9]+\.pt"


def wrote(seen: Evidence) -> str | None:
    """Return the name by what the files of the model are called."""
    return "verl" if seen.has_file(_MODEL) else None


VERL = Trainer(
    name="verl",
    wrote=wrote,
    steps=("global_step_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    companions=("huggingface",),
    ranks=(r"(?:model|optim|extra_state)_world_size_[0-9]+_rank_([0-9]+)\.pt",),
    unread={rf"(?!model_world_size_1_){_MODEL}": "a file of torch.save for each rank, as verl saves"},
)
