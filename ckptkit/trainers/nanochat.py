"""Know the checkpoints of nanochat: files of one directory, told by the step in their names.

Source: nanochat/checkpoint_manager.py, `save_checkpoint`: `model_000500.pt`, a bare state dict; `meta_000500.json`; and
of each rank `optim_000500_rank0.pt`, of which the states are a rank's own slices.
"""

from __future__ import annotations

from ckptkit.layout import KeyPath
from ckptkit.trainers.trainer import Evidence, Trainer

_OPTIMIZER = "optimizer_of_rank"


def wrote(seen: Evidence) -> str | None:
    """Return the name by what the file of the model is called, and the file of settings beside it."""
    step = seen.place.stem.removeprefix("model_")
    return (
        "nanochat" if (seen.place.parent / f"meta_{step}.json").exists() and seen.has_file(r"model_\d{6}\.pt") else None
    )


def rank_of_key(key: KeyPath) -> int | None:
    return int(key[1]) if key[0] == _OPTIMIZER and len(key) > 1 and str(key[1]).isdecimal() else None


NANOCHAT = Trainer(
    name="nanochat",
    wrote=wrote,
    steps=(r"model_([0-9]{6,18})",),
    beside={r"optim_(?P<step>[0-9]{6,18})_rank(?P<rank>[0-9]{1,9})\.pt": _OPTIMIZER + ".{rank}"},
    ranks=(r"optim_[0-9]{6,18}_rank([0-9]{1,9})\.pt",),
    rank_of_key=rank_of_key,
)
