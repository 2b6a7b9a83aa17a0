"""Know models that Diffusers saved, by the version in their config. Source: diffusers/configuration_utils.py."""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    return "Diffusers" if "_diffusers_version" in seen.read_json("config.json") else None


DIFFUSERS = Trainer(name="diffusers", wrote=wrote)
