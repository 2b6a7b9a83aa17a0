"""Converts: any checkpoint that can be read into any format that can be written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, path_of
from ckptkit.errors import Usage
from ckptkit.files.path import to_local
from ckptkit.formats import get_writer
from ckptkit.ops.consolidate import DEFAULT_SHARD_SIZE, consolidate
from ckptkit.ops.conversion.key import Recipe
from ckptkit.ops.conversion.output import ALONE, Output, Workers
from ckptkit.ops.conversion.result import Converted
from ckptkit.ops.conversion.rewrite import Request, rewrite
from ckptkit.ops.selection import Edits
from ckptkit.progress import Progress


def convert(
    src: Source,
    dst: str | Path,
    *,
    to: str,
    world_size: int | None = None,
    under: str = "",
    dtype: str | Sequence[str] = (),
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
    workers: Workers = ALONE,
) -> Converted:
    """Write the checkpoint at `src`, or the latest of a run, to directory `dst` in the format `to`.

    "dcp" and "pt" keep everything, optimizer and all, and the files beside it; a `dst` like `model.pt` is made a file,
    with nothing beside it. `under` puts all under a key, such as `model`; "dcp" is written for `world_size` ranks, by
    default as many as before. "hf" is `consolidate`: the model only. `include` and `exclude` are globs of names as the
    checkpoint has them; `rename` rules `REGEX=>TEXT` on the names of parameters, in the optimizer too; `dtype` one for
    the weights, or `GLOB=DTYPE` for whatever matches; `workers` lets several processes share the work. Raises a
    `CkptError`, and leaves `dst` as it was, if anything does not fit or a checksum differs.
    """
    recipe = Recipe.of("convert", locals(), src=path_of(src), dst=to_local(dst))
    asked = Edits(include, exclude, rename, [dtype] if isinstance(dtype, str) else dtype)
    writer = get_writer(to)
    if world_size is not None and not writer.is_sharded:
        raise Usage(f"`{to}` is the same for any number of ranks", hint="leave --world-size out")
    is_file = to_local(dst).suffix in writer.suffixes
    output = Output(to_local(dst), overwrite, sync, jobs, progress, workers, is_file)
    if to != "hf":
        request = Request(writer, asked, max_shard_size, world_size, (under,) if under else ())
        return rewrite(Checkpoint.open(src), request, output, recipe, dry_run=dry_run)
    if under:
        raise Usage("the weights of a Hugging Face model lie under no key", hint="rename them with --rename '^=>KEY.'")
    return consolidate(
        src,
        dst,
        dtype=dtype,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        rename=rename,
        overwrite=overwrite,
        dry_run=dry_run,
        jobs=jobs,
        sync=sync,
        progress=progress,
        workers=workers,
    )
