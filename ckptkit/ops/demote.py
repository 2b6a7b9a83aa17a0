"""Demote a checkpoint of a training to its model's weights in bfloat16, under its own name.

At every moment all of the old or all of the new is there: the new is made in a hidden sibling, read again, exchanged
with the old in one step, and only then is the old deleted.
"""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.checkpoints.sums import replace_manifest, sum_files
from ckptkit.destinations.allocation import write_file
from ckptkit.destinations.staging import Stage
from ckptkit.files.system import again
from ckptkit.layout import Layout, Spec
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.verify import verify_part
from ckptkit.progress import Told
from ckptkit.runs.retention import read_metrics, write_metrics
from ckptkit.tensors.dtypes import DTYPES
from ckptkit.trainers.ckptkit import METRICS

_NARROW = DTYPES["bfloat16"]
_MODEL = "model"  # the directory in the hidden one that the model is made in


def demoted_bytes(checkpoint: Path) -> int:
    """Return the bytes of the tensors that would be left. Raises a `CkptError` if the model cannot be told."""
    weights = Checkpoint.open(checkpoint).weights.layout
    return sum(spec.numel * (_NARROW if is_wide(spec) else spec.dtype).itemsize for spec in weights.specs.values())


def is_wide(spec: Spec) -> bool:
    """Return True for floats of more than 16 bits; others stay as they are."""
    return spec.dtype.can_become(_NARROW) and spec.dtype.itemsize > _NARROW.itemsize


def demote(checkpoint: Path, *, saved_at: float, jobs: int | None = None, progress: Told | None = None) -> int:
    """Replace the checkpoint in directory `checkpoint` by its weights, as files of time `saved_at`.

    Returns how many tensors stayed in more than 16 bits, as loaders keep them so. Raises a `CkptError`, and leaves the
    checkpoint as it was, if anything does not fit or what was written is not what is read.
    """
    stage = Stage(checkpoint, overwrite=True)
    try:
        model = stage.open().path / _MODEL
        make_model(checkpoint, model, jobs, progress)
        keep_metrics(checkpoint, model)
        for problem in verify_part(model, jobs=jobs, progress=progress).problems:
            raise problem
        wide = sum(map(is_wide, Checkpoint.open(model).weights.layout.specs.values()))
        for file in model.iterdir():
            os.utime(file, (saved_at, saved_at))
            again(os.rename, file, stage.path / file.name)
        again(model.rmdir)
        stage.commit()
    except BaseException as error:
        stage.discard()
        error.__notes__ = []  # of what could be gone on with: it went too
        raise
    return wide


def make_model(checkpoint: Path, model: Path, jobs: int | None, progress: Told | None) -> None:
    """Write the weights of a checkpoint, with config and tokenizer, to directory `model`."""
    weights = Checkpoint.open(checkpoint).weights.layout
    tell = None if progress is None else lambda nbytes, _total: progress(nbytes)
    consolidate(checkpoint, model, dtype=dtypes_for(weights), jobs=jobs, progress=tell)


def dtypes_for(weights: Layout) -> list[str]:
    """Return the rules by which floats of more than 16 bits become bfloat16, and no others change."""
    others = [name for name, spec in weights.specs.items() if not is_wide(spec)]
    return [_NARROW.name, *(f"{glob.escape(name)}=keep" for name in others)]


def keep_metrics(checkpoint: Path, model: Path) -> None:
    """Put what was measured at a checkpoint beside its weights, and into their manifest."""
    metrics = read_metrics(checkpoint)
    manifest = read_manifest(model)
    if metrics and manifest is not None:
        content = write_metrics(Checkpoint.at(checkpoint).own_step or 0, metrics)
        write_file(model / METRICS, content)
        files = {**manifest.files, **sum_files(model, {METRICS}, ())}
        replace_manifest(model, replace(manifest, files=files))
