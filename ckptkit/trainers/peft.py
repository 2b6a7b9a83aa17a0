"""Know adapters that PEFT saved, by their config. Source: peft/utils/constants.py.

A trainer leaves one beside the states of all ranks, in which its parameters have other names.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_CONFIG = "adapter_config.json"


def wrote(seen: Evidence) -> str | None:
    return "PEFT" if _CONFIG in seen.files else None


PEFT = Trainer(name="peft", wrote=wrote, exported=(r"adapter_model\.safetensors",))
