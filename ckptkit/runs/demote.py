"""Demote a training checkpoint: replace it by the weights of its model in bfloat16, under the same name.

Either the old or the new checkpoint is complete at every moment: demote writes the new checkpoint to a hidden sibling,
verifies it, swaps the two atomically, and only then deletes the old one.
"""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.examination import examine_checkpoint
from ckptkit.checkpoints.examination.optimizers import find_train_mode_schedule_free
from ckptkit.checkpoints.finalize_files import file_checksums, replace_manifest
from ckptkit.checkpoints.find_components import CHECKPOINT, LINK, RUN
from ckptkit.checkpoints.manifest import FileSum, Manifest, read_manifest
from ckptkit.checks.verify import verify_component
from ckptkit.conversion.convert import consolidate, plan_conversion, require_all_copied_or_explained
from ckptkit.errors import Mismatch
from ckptkit.io.allocation import create_file
from ckptkit.io.disk import retry_interrupted
from ckptkit.io.progress import BytesDone
from ckptkit.io.staging import Stage, errors_naming_destination
from ckptkit.layout import Layout, Spec
from ckptkit.layout.dtypes import DTYPES
from ckptkit.runs.retention import dump_metrics, read_metrics
from ckptkit.state.options import ConvertOptions
from ckptkit.trainers.ckptkit import METRICS

_NARROW = DTYPES["bfloat16"]
_MODEL = "model"  # subdirectory of the hidden directory that the model is written to


class Demotion(NamedTuple):
    """The plan of a `demote`: the bytes of all files after it, and the names of the entries and files it deletes."""

    nbytes: int
    deletes: tuple[str, ...]


def plan_demotion(checkpoint: Path) -> Demotion:
    """Return the plan of a `demote`, with the exact number of bytes. Writes nothing.

    Raises a `CkptError` if `demote` would fail, as far as this is known without reading tensors. It also fails if it
    would delete anything besides training state, such as a second model, another checkpoint or an unknown file, and if
    the averaged weights for evaluation are only in the optimizer state.
    """
    opened = Checkpoint.open(checkpoint)
    for finding in examine_checkpoint(opened, (find_train_mode_schedule_free,)):
        raise finding.to_error(checkpoint)  # the averaged weights are only in the optimizer state
    weights = opened.weights.layout
    options = ConvertOptions.of({"dtype": dtype_rules_to_bfloat16(weights), "allow_unmatched": True}, to="hf")
    conversion = plan_conversion([checkpoint], checkpoint.with_name(f".{checkpoint.name}.{_MODEL}"), options)
    require_all_copied_or_explained(conversion)
    for left in conversion.left_behind:
        if left.why in (CHECKPOINT, LINK, RUN):  # a conversion ignores it, but `demote` would delete it
            message = f"`{left.name}` would be deleted ({left.why})"
            raise Mismatch(message, path=left.path, hint="move it out of the directory first")
    files = {name: FileSum(nbytes, 0) for name, nbytes in conversion.file_sizes.items()}
    if metrics := metrics_file_content(checkpoint):
        files[METRICS] = FileSum(len(metrics), 0)
    (model,) = conversion.drafts
    manifest = Manifest(files, dict.fromkeys(model.wanted.tensors, 0), model.made_of)
    nbytes = sum(file.nbytes for file in files.values()) + len(manifest.to_bytes())
    dropped = [group.name for entries in conversion.entries for group in entries.dropped_by_reason()]
    return Demotion(nbytes, (*dropped, *(left.name for left in conversion.left_behind if left.path.name != METRICS)))


def is_wider_than_bfloat16(spec: Spec) -> bool:
    """Return True for floats of more than 16 bits, which demote casts."""
    return spec.dtype.is_castable_to(_NARROW) and spec.dtype.itemsize > _NARROW.itemsize


def demote(checkpoint: Path, *, saved_at: float, jobs: int | None = None, progress: BytesDone | None = None) -> int:
    """Replace the checkpoint in directory `checkpoint` by its weights; the files get the modification time `saved_at`.

    Returns the number of tensors that keep more than 16 bits, because loaders require it. Raises a `CkptError`, and
    leaves the checkpoint unchanged, if it cannot be converted or if the written files fail verification.
    """
    plan_demotion(checkpoint)
    stage = Stage(checkpoint, overwrite=True)
    try:
        with errors_naming_destination(checkpoint, inside=_MODEL):
            model = stage.open().path / _MODEL
            dtypes = dtype_rules_to_bfloat16(Checkpoint.open(checkpoint).weights.layout)
            advance = None if progress is None else lambda nbytes, _total: progress(nbytes)
            consolidate(checkpoint, model, dtype=dtypes, allow_unmatched=True, jobs=jobs, progress=advance)
            add_metrics_to_model(checkpoint, model)
            for problem in verify_component(model, jobs=jobs, progress=progress).problems:
                raise problem
            wide = sum(map(is_wider_than_bfloat16, Checkpoint.open(model).weights.layout.specs.values()))
            for file in model.iterdir():
                os.utime(file, (saved_at, saved_at))
                retry_interrupted(os.rename, file, stage.path / file.name)
            retry_interrupted(model.rmdir)
            stage.commit()
    except BaseException as error:
        stage.discard()
        error.__notes__ = []  # drop notes on how to continue: the partial output has just been discarded
        raise
    return wide


def dtype_rules_to_bfloat16(weights: Layout) -> list[str]:
    """Return rules for the option `dtype` that cast floats of more than 16 bits to bfloat16, and keep other tensors."""
    others = [name for name, spec in weights.specs.items() if not is_wider_than_bfloat16(spec)]
    return [_NARROW.name, *(f"{glob.escape(name)}=keep" for name in others)]


def add_metrics_to_model(checkpoint: Path, model: Path) -> None:
    """Write the metrics of a checkpoint next to its weights, and add them to the manifest."""
    content = metrics_file_content(checkpoint)
    manifest = read_manifest(model)
    if content and manifest is not None:
        create_file(model / METRICS, len(content), [(0, content)])
        files = {**manifest.files, **file_checksums(model, {METRICS}, ())}
        replace_manifest(model, replace(manifest, files=files))


def metrics_file_content(checkpoint: Path) -> bytes:
    metrics = read_metrics(checkpoint)
    return dump_metrics(Checkpoint.at(checkpoint).step_in_name or 0, metrics) if metrics else b""
