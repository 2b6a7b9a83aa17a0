"""Know the names of NeMo's checkpoints, which have values in them: `model--loss=2.5-step=5-consumed_samples=40.0`.

Source: nemo/lightning/pytorch/callbacks/model_checkpoint.py.
"""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Trainer

NEMO = Trainer(name="nemo", steps=(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:[-.].*)?",))
