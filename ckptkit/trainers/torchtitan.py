"""Know the checkpoints of torchtitan.

Source: torchtitan/components/checkpoint.py: DCP directories `step-N`, model names at the top level beside `optimizer.`,
`lr_scheduler`, `dataloader` and `train_state`.
"""

from __future__ import annotations

import re

from ckptkit.layout import KeyPath
from ckptkit.trainers.trainer import Evidence, Trainer

_LOADER = re.compile(r"dp_rank_(\d+)")  # `dataloader.dp_rank_3`


def wrote(seen: Evidence) -> str | None:
    return "torchtitan" if "train_state" in seen.keys else None


def rank_of_key(key: KeyPath) -> int | None:
    match = _LOADER.match(str(key[1])) if key[0] == "dataloader" and len(key) > 1 else None
    return int(match[1]) if match else None


TORCHTITAN = Trainer(name="torchtitan", wrote=wrote, steps=("step-([0-9]{1,18})",), rank_of_key=rank_of_key)
