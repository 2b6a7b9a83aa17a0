"""Know NeMo's checkpoints: `model--loss=2.5-step=5-consumed_samples=40.0`, with `weights` and `context` in it.

Source: `model_checkpoint.py` of its callbacks. What is in `weights` is as the core library saves, which it trains with.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    return "NeMo" if seen.place.name == "weights" and (seen.place.parent / "context").is_dir() else None


NEMO = Trainer(name="nemo", wrote=wrote, steps=(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:[-.].*)?",))
