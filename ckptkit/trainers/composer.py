"""Know the checkpoints of MosaicML Composer.

Source: composer/utils/checkpoint.py: directories `ep0-ba5`, files `ep0-ba5-rank0.pt`, all under `state`, and the
generators of ranks under `rng`. composer/checkpoint/save.py: `model` and `optim` in directories of their own.
"""

from __future__ import annotations

from ckptkit.layout import KeyPath
from ckptkit.trainers.trainer import Evidence, Trainer

_METADATA = "composer_metadata.json"


def wrote(seen: Evidence) -> str | None:
    """Return the name by a file beside the model, or by the model under `state`, and generators beside that."""
    if _METADATA in seen.files or (seen.place.parent / _METADATA).exists():
        return "Composer"
    has_both = "state" in seen.keys and "rng" in seen.keys
    return "Composer" if has_both and "model" in seen.below["state"] else None


def rank_of_key(key: KeyPath) -> int | None:
    return key[1] if key[0] == "rng" and len(key) > 1 and isinstance(key[1], int) else None


COMPOSER = Trainer(
    name="composer",
    wrote=wrote,
    trackers=("latest-rank0.symlink", "latest-rank0.pt.symlink"),  # text: the object's name in a store
    steps=(r"ep[0-9]+-ba([0-9]{1,18})(?:-rank[0-9]+)?",),
    rank_of_key=rank_of_key,
)
