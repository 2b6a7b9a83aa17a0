"""Know the checkpoints of verl.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py: `global_step_N/{actor,critic}` with a file of torch.save for
each rank, and config and tokenizer in `huggingface`.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Trainer

VERL = Trainer(
    name="verl",
    steps=("global_step_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    companions=("huggingface",),
    ranks=(r"(?:model|optim|extra_state)_world_size_[0-9]+_rank_([0-9]+)\.pt",),
    unread={r"model_world_size_(?!1_)[0-9]+_rank_[0-9]+\.pt": "a file of torch.save for each rank, as verl saves"},
)
