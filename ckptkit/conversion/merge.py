"""Merge adapters into the model that they were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Unpack

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.conversion.convert import run_conversion
from ckptkit.errors import Usage
from ckptkit.io.path import to_model_path
from ckptkit.state.options import ConvertOptions, Keywords, with_spelled_options
from ckptkit.state.report import Converted
from ckptkit.words import count


@with_spelled_options
def merge(
    model: Source,
    adapters: Source | Sequence[Source],
    dst: str | Path,
    *,
    weights: Sequence[float] = (),
    to: str = "hf",
    **options: Unpack[Keywords],
) -> Converted:
    """Merge one or more LoRA adapters into a model, and write it to `dst`, in the format `to`.

    The model is a checkpoint of any format, local or remote. An adapter is a directory that PEFT saved, or a training
    checkpoint with the adapter's config. Each changed weight is W + scaling * B A, computed in float32 and rounded once
    to the model's dtype, or to `dtype`. With several adapters, their weight updates are added, each times its weight in
    `weights`, by default 1. `include`, `exclude` and `rename` apply to the merged model's names. For the other options
    see `convert`. Raises `Mismatch` for an adapter that does not fit the model or its config, and `Unsupported` for an
    unknown method.
    """
    given = list(adapters) if isinstance(adapters, Sequence) and not isinstance(adapters, str) else [adapters]
    if not given:
        raise Usage("expected at least one adapter to merge, found none")
    if weights and len(weights) != len(given):
        message = f"expected {count(len(given), 'factor')}, one for each adapter, found {len(weights)}"
        raise Usage(message, hint="pass a factor for each, like 1,0.5")
    if not all(map(isfinite, weights)):
        raise Usage(f"expected finite factors, found {', '.join(map(str, weights))}")
    options["merge"] = True
    base = model if isinstance(model, Checkpoint) else to_model_path(model)
    return run_conversion([base, *given], dst, ConvertOptions.of(options, to=to, scales=tuple(weights)))
