"""Know the checkpoints of orbax, which JAX programs save: arrays of zarr, as a rule in a key-value store.

Source: google/orbax: `_CHECKPOINT_METADATA` with the items in directories, in each of them `_METADATA` and, with OCDBT,
`manifest.ocdbt` and `ocdbt.process_N`.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_FILE = r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|ocdbt\.process_[0-9]+"


def wrote(seen: Evidence) -> str | None:
    return "orbax" if seen.has_file(_FILE) else None


ORBAX = Trainer(
    name="orbax",
    wrote=wrote,
    unread={_FILE: "arrays as orbax saves"},
    hints={_FILE: "load them with orbax, and save the arrays with safetensors"},
)
