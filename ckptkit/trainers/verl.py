"""Know the checkpoints of verl.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py: `global_step_N/{actor,critic}` with a file of torch.save for
each rank, config and tokenizer in `huggingface`, and an adapter's config in `lora_adapter`.
"""

from __future__ import annotations

import re

from ckptkit.layout import KeyPath
from ckptkit.trainers.trainer import Evidence, Trainer

_OWN = re.compile(r"rank_(\d+)")  # `rng.rank_3`
_MODEL = r"model_world_size_[0-9]+_rank_[0-9]+\.pt"


def wrote(seen: Evidence) -> str | None:
    return "verl" if seen.has_file(_MODEL) else None


def rank_of_key(key: KeyPath) -> int | None:
    """Return the rank whose random state, or other state of its own, lies at a key path."""
    match = _OWN.fullmatch(str(key[1])) if len(key) > 2 else None
    return int(match[1]) if match else None


VERL = Trainer(
    name="verl",
    wrote=wrote,
    steps=("global_step_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    companions=("huggingface", "lora_adapter"),
    rank_of_key=rank_of_key,
    ranks=(r"(?:model|optim|extra_state)_world_size_[0-9]+_rank_([0-9]+)\.pt",),
)
