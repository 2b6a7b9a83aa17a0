"""Know adapters that PEFT saved, by their config. Source: peft/utils/constants.py."""

from __future__ import annotations

from ckptkit.checkpoints.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    """Return the name by the adapter's config."""
    return "PEFT" if "adapter_config.json" in seen.files else None


PEFT = Trainer(name="peft", wrote=wrote)
