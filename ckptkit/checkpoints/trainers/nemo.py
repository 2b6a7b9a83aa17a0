"""Know the names of NeMo's checkpoints, which have values in them: `model--loss=2.5-step=5-consumed_samples=40.0`.

Source: `model_checkpoint.py` of its callbacks.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Trainer

NEMO = Trainer(name="nemo", steps=(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:[-.].*)?",))
