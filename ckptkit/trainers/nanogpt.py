"""Know the checkpoints of nanoGPT: `ckpt.pt`, with model, optimizer and the counts of its training.

Source: nanoGPT/train.py, which keeps the last one only.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_OWN = frozenset({"model", "model_args", "iter_num", "best_val_loss"})


def wrote(seen: Evidence) -> str | None:
    return "nanoGPT" if seen.keys >= _OWN else None


NANOGPT = Trainer(name="nanogpt", wrote=wrote, step_keys=(("", ("iter_num",)),))
