"""Know the checkpoints of OLMo-core.

Source: olmo_core/train/checkpoint.py: `stepN` with DCP in `model_and_optim`, the state of each rank in
`train`, and `.metadata.json`, without which it is no checkpoint.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_DCP = "model_and_optim"


def wrote(seen: Evidence) -> str | None:
    return "OLMo-core" if seen.place.name == _DCP else None


OLMO = Trainer(
    name="olmo",
    wrote=wrote,
    steps=("step([0-9]{1,18})",),
    kept={"train": _DCP, ".metadata.json": _DCP},  # a rank without a file of its own takes that of rank 0
)
