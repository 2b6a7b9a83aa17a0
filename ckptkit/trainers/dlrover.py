"""Know the tracker of DLRover's flash checkpoints.

Source: dlrover/python/common/constants.py, `CheckpointConstant.TRACER_FILE_NAME`.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Trainer

DLROVER = Trainer(name="dlrover", trackers=("dlrover_latest.txt",))
