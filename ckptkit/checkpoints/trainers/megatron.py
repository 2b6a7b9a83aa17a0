"""Know the checkpoints of Megatron-LM, Megatron-Core and Megatron-Bridge.

Source: megatron/training/checkpointing.py, megatron/core/dist_checkpointing: `iter_0000500` with metadata.json and DCP
in it, or a directory `mp_rank_TT_PPP` for each rank of tensors and pipeline.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    """Return the name by the file that says how the shards are stored."""
    return "Megatron" if "sharded_backend" in seen.read_json("metadata.json") else None


MEGATRON = Trainer(
    name="megatron",
    wrote=wrote,
    steps=("iter_([0-9]{1,18})",),
    trackers=("latest_checkpointed_iteration.txt",),
    unread={"mp_rank_[0-9]{2}(?:_[0-9]{3})*": "a directory for each rank of tensors and pipeline, as Megatron saves"},
)
