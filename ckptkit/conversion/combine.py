"""Make one model of several sources: average the models in checkpoints, or merge adapters into their base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum, isclose, isfinite
from pathlib import Path
from typing import Unpack

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, find_latest_checkpoint, path_of_source
from ckptkit.checkpoints.run import RunFolder
from ckptkit.conversion.convert import run_conversion
from ckptkit.errors import Usage
from ckptkit.io.path import to_model_path
from ckptkit.state.options import ConvertOptions, Keywords, with_full_signature
from ckptkit.state.report import Converted
from ckptkit.words import command_line, count

_TOLERANCE = 1e-6  # weights whose sum is this close to 1 need no note about the division


@with_full_signature
def average(
    sources: Source | Sequence[Source],
    dst: str | Path,
    *,
    weights: Sequence[float] = (),
    last: int | None = None,
    to: str = "hf",
    **options: Unpack[Keywords],
) -> Converted:
    """Write the weighted mean of the models in several checkpoints to `dst`, in the format `to`.

    With `last`, pass one run: the sources are its `last` newest complete checkpoints. Sources may have any formats,
    world sizes and dtypes, but must have the same names and shapes. The result has the names and dtypes of the first
    source, unless you pass `dtype`. "hf" writes the model's own names, with config and tokenizer. `weights` must be
    positive and are divided by their sum; by default all are equal. ckptkit sums floats in float64, in the order of the
    sources, and rounds at the end. Integers and booleans come from the last source. The result has no optimizer,
    because a mean of optimizer states is useless. `include` and `exclude` are globs of the names in each checkpoint.
    For the other options and the errors, see `convert`.
    """
    asked = ConvertOptions.of(options, to=to)
    chosen = choose_sources(sources, last)
    if asked.changes_names and not asked.writer.is_model_only:
        hint = "write a Hugging Face model first, then convert it"
        raise Usage(f"--names, --map and --vocab-size cannot change an average in `{asked.to}`", hint=hint)
    if weights and len(weights) != len(chosen):
        message = f"expected {count(len(chosen), 'factor')}, one for each checkpoint, found {len(weights)}"
        raise Usage(message, hint="pass a factor for each, like 2,1,1")
    if not all(isfinite(weight) and weight > 0 for weight in weights):
        raise Usage(f"expected positive factors, found {', '.join(map(str, weights))}")
    largest = max(weights, default=1.0)  # so that the sum is finite
    parts = [weight / largest for weight in weights] or [1.0] * len(chosen)
    asked = replace(asked, weights=tuple(part / fsum(parts) for part in parts))
    asked.check()
    done = run_conversion(chosen, dst, asked)
    total = sum(weights)
    if not weights or isclose(total, 1, abs_tol=_TOLERANCE):
        return done
    return replace(done, notes=[f"divided the factors by their sum, {total:g}", *done.notes])


def choose_sources(sources: Source | Sequence[Source], last: int | None) -> list[Checkpoint]:
    """Return the checkpoints to average: the given ones, or the last ones of the given run, oldest first."""
    given = list(sources) if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
    if last is None:
        if len(given) < 2:
            path = path_of_source(given[0]) if given else None
            hint = "pass at least two and then OUT, or --last N for the last N of a run"
            raise Usage("expected at least 2 checkpoints to average, found 1", path=path, hint=hint)
        return [Checkpoint.open(source) for source in given]
    if len(given) != 1:
        raise Usage(f"--last: expected 1 run, found {count(len(given), 'path')}")
    run = path_of_source(given[0])
    complete, latest = RunFolder(run).checkpoints(), find_latest_checkpoint(run)
    if latest is not None and latest.step_in_name is not None:  # the training may have been rolled back to it
        complete = [checkpoint for checkpoint in complete if (checkpoint.step_in_name or 0) <= latest.step_in_name]
    if not 0 < last <= len(complete):
        message = f"--last: expected at most {len(complete)} (complete checkpoints of the run), found {last}"
        raise Usage(message, path=run, hint=f"run {command_line('ls', run)} to list its checkpoints")
    return complete[-last:]


@with_full_signature
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
