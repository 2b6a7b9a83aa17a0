"""Producers: who wrote a checkpoint, told by what only they leave: file names, key paths, notes. Guesses nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.errors import Corrupt, IOFailure, Unsafe
from ckptkit.files.file import names_in, read_small
from ckptkit.formats.json_text import parse_json
from ckptkit.layout import Layout

_ACCELERATE = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[0-9]+|pytorch_model_fsdp(?:_[0-9]+)?\.bin")
_OWN = {"step", "model", "optim", "scheduler", "progress"}  # what `ckptkit train` saves, all together
_LIMIT = 1 << 24  # bytes of a small JSON file


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint shows: its place and format, the names of its files, and its recorded keys.

    `keys` are the first steps of the ways to its entries, `second` those that follow on each.
    """

    place: Path
    format: str
    world_size: int | None
    files: frozenset[str]
    keys: frozenset[str]
    second: Mapping[str, frozenset[str]]

    def json(self, name: str) -> Mapping[str, Any]:
        """A small file of JSON in it, {} if there is none that can be read."""
        if name not in self.files:
            return {}
        path = self.place / name  # a file by itself has none beside it that is of it
        try:
            found = parse_json(read_small(path, _LIMIT), path)
        except (Corrupt, IOFailure, Unsafe):
            return {}
        return found if isinstance(found, dict) else {}


def find_producer(place: Path, layout: Layout, *others: Layout) -> str | None:
    """Who wrote the checkpoint at `place`, with the layout of it and of its other parts; None if nothing tells."""
    evidence = gather(place, layout, *others)
    return next((name for name in (tell(evidence) for tell in _TELLING) if name), None)


def gather(place: Path, layout: Layout, *others: Layout) -> Evidence:
    """Look at names; no file is opened."""
    second: dict[str, set[str]] = {}
    for part in (layout, *others):
        for name in part.names:
            key = part.key(name)
            second.setdefault(str(key[0]), set()).update(map(str, key[1:2]))
    return Evidence(
        place,
        layout.format,
        layout.world_size,
        frozenset(names_in(layout.root)) if place.is_dir() else frozenset({place.name}),
        frozenset(second),
        {key: frozenset(names) for key, names in second.items()},
    )


def tell_ckptkit(seen: Evidence) -> str | None:
    """By a manifest that says what the checkpoint was made of; or by what its training loop saves, all together."""
    try:
        manifest = read_manifest(seen.place) if seen.place.is_dir() else None
    except (Corrupt, IOFailure, Unsafe):
        manifest = None
    if manifest and manifest.source:
        return f"ckptkit, of a `{manifest.source.get('format')}` checkpoint"
    is_own = seen.keys == _OWN or ({"training"} <= seen.files and _OWN - {"model"} <= seen.keys)
    return "ckptkit train (FSDP)" if is_own else None


def tell_accelerate(seen: Evidence) -> str | None:
    """By the names that Accelerate gives to models and optimizers, and by the state that a Trainer leaves with them."""
    if not _ACCELERATE.fullmatch(seen.place.name):
        return None
    has_trainer = (seen.place.parent / "trainer_state.json").exists()
    return "Accelerate, by transformers' Trainer" if has_trainer else "Accelerate"


def tell_trainer(seen: Evidence) -> str | None:
    """By files and keys that only one trainer has."""
    if "meta.pt" in seen.files or "pytorch-lightning_version" in seen.keys:
        return "Lightning"
    if "sharded_backend" in seen.json("metadata.json"):
        return "Megatron"
    if "state" in seen.keys and "rng" in seen.keys and "model" in seen.second["state"]:
        return "Composer"
    marks = {"train_state": "torchtitan", "epochs_run": "torchtune"}
    return next((name for key, name in marks.items() if key in seen.keys), None)


def tell_model(seen: Evidence) -> str | None:
    """By the files that libraries put beside weights in safetensors or torch.save's files."""
    if "adapter_config.json" in seen.files:
        return "PEFT"
    if "trainer_state.json" in seen.files:
        return "transformers' Trainer"
    if "transformers_version" in seen.json("config.json"):
        return "transformers"
    return "Diffusers" if "_diffusers_version" in seen.json("config.json") else None


def tell_torch(seen: Evidence) -> str | None:
    """By the format, if it is torch's own."""
    if seen.format == "hf":
        return None if seen.world_size is None else "torch.distributed.checkpoint, as safetensors"
    return {"dcp": "torch.distributed.checkpoint", "pt": "torch.save"}.get(seen.format)


_TELLING: tuple[Callable[[Evidence], str | None], ...] = (
    *(tell_ckptkit, tell_accelerate, tell_trainer, tell_torch, tell_model),
)
