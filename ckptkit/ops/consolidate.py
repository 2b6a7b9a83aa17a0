"""Consolidates: the model of a training checkpoint as a Hugging Face model that every loader opens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ckptkit import edits
from ckptkit.checkpoints.checkpoint import Checkpoint, Source, path_of
from ckptkit.checkpoints.companions import CONFIG, Companions, find_companions, mend_config
from ckptkit.checkpoints.fit import fit
from ckptkit.checkpoints.weights import find_weights
from ckptkit.files.origin import Origin
from ckptkit.files.path import to_local
from ckptkit.files.staging import check_destination
from ckptkit.formats import get_writer
from ckptkit.layout import Layout, Options
from ckptkit.ops.conversion.drafts import Drafts, make_draft
from ckptkit.ops.conversion.key import Recipe
from ckptkit.ops.conversion.output import ALONE, Output, Workers
from ckptkit.ops.conversion.pipeline import check_apart
from ckptkit.ops.conversion.result import Converted, carry_out
from ckptkit.ops.selection import Edits
from ckptkit.progress import Progress

DEFAULT_SHARD_SIZE = 5 * 10**9


def consolidate(
    src: Source,
    dst: str | Path,
    *,
    dtype: str | Sequence[str] = (),
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    base: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
    workers: Workers = ALONE,
) -> Converted:
    """Write the model weights of the checkpoint at `src` to directory `dst` as safetensors, with config and tokenizer.

    `dtype` converts floats of 16 bits and more, `GLOB=DTYPE` some of them; `max_shard_size` is in bytes; `base` is a
    directory or Hub id to take config and tokenizer from; `include` and `exclude` are globs of names as the checkpoint
    has them, `rename` rules `REGEX=>TEXT` on the model's own names; `strict` refuses tensors that config.json does not
    call for; without `sync` the result may not outlive a power cut; `workers` lets several processes share the work.
    Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit or a checksum differs.
    """
    recipe = Recipe.of("consolidate", locals(), src=path_of(src), dst=to_local(dst), base=settle_base(base))
    began = time.perf_counter()
    dst = to_local(dst)
    check_destination(dst, overwrite)
    part = Checkpoint.open(src).model_part
    source = part.path
    origin = Origin.of(source)
    check_apart(source, dst)
    asked = Edits(include, exclude, rename, [dtype] if isinstance(dtype, str) else dtype)
    whole = part.layout
    asked.check_globs([whole])
    found = find_weights(edits.select(whole, asked.admit))
    new_name = asked.renaming()
    came_from = {new_name(name): old for name, old in found.came_from.items()}
    companions = find_companions(source, base)
    layout, notes = fit(edits.rename(found.layout, new_name), companions, strict)
    layout, casts = asked.cast(layout, lambda _: True)
    draft = make_draft(layout, get_writer("hf"), Options(max_shard_size))
    drafts = Drafts(origin, [draft], companion_files(companions, layout))
    report = Converted(
        source=source,
        output=dst,
        format="hf",
        wrapper=found.wrapper,
        files=drafts.file_sizes,
        tensors=len(layout.tensors),
        nbytes=layout.nbytes,
        renamed={old: new for new, old in came_from.items() if new in layout.tensors and old != new},
        dropped=found.left_out,
        cast=casts,
        notes=notes,
        dry_run=dry_run,
    )
    return carry_out(drafts, Output(dst, overwrite, sync, jobs, progress, workers), recipe, report, began)


def settle_base(base: str | None) -> str | None:
    """The base as every process finds it, wherever it runs."""
    return str(Path(base).absolute()) if base is not None and Path(base).is_dir() else base


def companion_files(companions: Companions, layout: Layout) -> dict[str, bytes]:
    """What to put beside the weights: the companions, with a config.json that says what is true of these weights."""
    if companions.config is None:
        return {}
    return companions.files | {CONFIG: mend_config(companions.config, layout.specs.values())}
