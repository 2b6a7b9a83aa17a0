"""Know the checkpoints of Megatron-LM, Megatron-Core and Megatron-Bridge.

Source: megatron/training/checkpointing.py, megatron/core/dist_checkpointing: `iter_0000500` with metadata.json and DCP
in it, or a directory `mp_rank_TT_PPP` for each rank of tensors and pipeline.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Evidence, Trainer
from ckptkit.layout import KeyPath

_RANK = "mp_rank_[0-9]{2}(?:_[0-9]{3})*"
_LAYER = r"(?:.*\.)?(?:decoder|encoder)\.layers\..*linear_(?:qkv|proj|fc1|fc2)\..*"


def wrote(seen: Evidence) -> str | None:
    """Return the name by the file that says how the shards are stored, or the directories of ranks."""
    is_sharded = "sharded_backend" in seen.read_json("metadata.json")
    return "Megatron" if is_sharded or seen.has_file(_RANK) else None


def rank_of_key(key: KeyPath) -> int | None:
    """Return the rank whose own state lies at a key path, as the legacy format is read."""
    return key[1] if key[0] == "rank_state" and len(key) > 1 and isinstance(key[1], int) else None


MEGATRON = Trainer(
    name="megatron",
    wrote=wrote,
    steps=("iter_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    own_names={_LAYER: "Megatron's"},
    rank_of_key=rank_of_key,
)
