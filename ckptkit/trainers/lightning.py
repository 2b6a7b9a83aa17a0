"""Know the checkpoints of Lightning and Fabric.

Source: lightning/fabric/strategies/{fsdp,model_parallel}.py, lightning/pytorch/callbacks/model_checkpoint.py: a DCP
directory with `meta.pt`, or one file, named by values: `epoch=1-step=500.ckpt`.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    """Return the name by the file beside DCP's, or by the version in a file of one's own."""
    return "Lightning" if "meta.pt" in seen.files or "pytorch-lightning_version" in seen.keys else None


LIGHTNING = Trainer(
    name="lightning",
    wrote=wrote,
    steps=(r"(?!\.)(?:.*-)?step=([0-9]{1,18})(?:\.ckpt)?",),
    beside={r"meta\.pt": ""},
    epochs=(r"epoch=([0-9]{1,18})(?:\.ckpt)?",),
)
