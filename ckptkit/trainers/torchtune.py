"""Know the checkpoints of torchtune.

Source: torchtune/training/checkpointing/_checkpointer.py: `epoch_N`, and recipe states with `epochs_run`.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    return "torchtune" if "epochs_run" in seen.keys else None


TORCHTUNE = Trainer(name="torchtune", wrote=wrote, epochs=("epoch_([0-9]{1,18})",))
