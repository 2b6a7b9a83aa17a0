"""Know the checkpoints of Megatron-LM, Megatron-Core and Megatron-Bridge.

Source: megatron/training/checkpointing.py, megatron/core/dist_checkpointing: `iter_0000500` with metadata.json and DCP
in it, or a directory `mp_rank_TT_PPP` for each rank of tensors and pipeline.
"""

from __future__ import annotations

from ckptkit.layout import KeyPath
from ckptkit.trainers.trainer import Evidence, Trainer

_RANK = "mp_rank_[0-9]{2}(?:_[0-9]{3})*"
_BRIDGE = r"run_config\.yaml|train_state\.pt"
_BUCKET = r"(?:chained_[0-9]+\.)?optimizer\.distributed\..*bucket_idx_.*"
_OPAQUE = "the optimizer does not say of which parameters its states are: they are carried as they are"


def wrote(seen: Evidence) -> str | None:
    """Return the name by the file that says how the shards are stored, or the directories of ranks."""
    if seen.has_file(_BRIDGE):
        return "Megatron-Bridge"
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
    unread={r"\.zarray": "arrays of zarr, as Megatron saved before `torch_dist`"},
    hints={r"\.zarray": "load and save it with a Megatron-LM that has both, such as core 0.12"},
    opaque={_BUCKET: _OPAQUE, r"rank_state\.[0-9]+\.(?:distrib_optim|optimizer)\..*": _OPAQUE},
    beside={r"common\.pt": ""},
    step_keys=(("", ("iteration",)),),
    rank_of_key=rank_of_key,
)
