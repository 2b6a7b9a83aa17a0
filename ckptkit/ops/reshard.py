"""Reshards: the same checkpoint, optimizer and all, written for another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.files.path import RemotePath, to_local
from ckptkit.formats import get_writer
from ckptkit.ops.conversion.key import Recipe
from ckptkit.ops.conversion.output import ALONE, Output, Workers
from ckptkit.ops.conversion.result import Converted
from ckptkit.ops.conversion.rewrite import Request, rewrite
from ckptkit.ops.selection import Edits
from ckptkit.progress import Progress

RUN = "run"  # where `ckptkit train` saves unless told otherwise
UNLIMITED = 1 << 62


def reshard(
    src: Source | None = None,
    dst: str | Path | None = None,
    *,
    to: int,
    dtype: str | Sequence[str] = (),
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
    """Write the checkpoint at `src` to directory `dst` as DCP for `to` ranks, each of which has its shards in one file.

    `src` may be a run, by default `run/` or else the current directory: then its latest complete checkpoint is meant.
    `dst` is by default `SRC-toN` beside it. Parts that are the same for any number of ranks, such as safetensors
    beside an optimizer in shards, are copied as they are. For the edits, and the errors, see `convert`.
    """
    given = dict(locals())
    source = Checkpoint.open(src if src is not None else default_source())
    path = to_local(dst) if dst is not None else default_output(source.path, to)
    recipe = Recipe.of("reshard", given, src=source.path, dst=path)
    asked = Edits(include, exclude, rename, [dtype] if isinstance(dtype, str) else dtype)
    request = Request(get_writer("dcp"), asked, UNLIMITED, to, only_sharded=True)
    output = Output(path, overwrite, sync, jobs, progress, workers)
    return rewrite(source, request, output, recipe, dry_run=dry_run)


def default_source() -> Path:
    """The run in the current directory, or that directory itself."""
    return Path(RUN) if Path(RUN).is_dir() else Path()


def default_output(source: Path, to: int) -> Path:
    """A directory beside the source, called like it; here, if that is remote."""
    if isinstance(source, RemotePath):
        return Path(f"{source.name}-to{to}")
    there = source if source.name not in ("", "..") else source.resolve()
    return there.with_name(f"{there.name}-to{to}")
