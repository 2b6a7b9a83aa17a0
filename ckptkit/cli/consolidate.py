"""`ckptkit consolidate`: options in, report out."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptkit.cli.conversion import (
    DryRun,
    Dtypes,
    Exclude,
    Include,
    Jobs,
    MaxShardSize,
    NoSync,
    Out,
    Overwrite,
    Part,
    Rename,
    Source,
    find_workers,
    show,
)
from ckptkit.cli.output import Json, Quiet, parse_bytes, progress_bar


def consolidate(
    src: Source,
    out: Out,
    dtype: Dtypes = None,
    max_shard_size: MaxShardSize = "5GB",
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Take config and tokenizer from this directory or Hub id.")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    rename: Rename = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="A tensor that config.json does not call for is an error.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    part: Part = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Turn a training checkpoint into a Hugging Face model.

    That is safetensors, with config and tokenizer beside them.

    Example: ckptkit consolidate run/ckpt-500 out

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or does not fit its config; 4 an I/O failure,
    OUT is as it was; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.ops.consolidate import consolidate as run

    with progress_bar("consolidating") as progress:
        done = run(
            src,
            out,
            dtype=dtype or (),
            max_shard_size=parse_bytes(max_shard_size),
            base=base,
            include=include or (),
            exclude=exclude or (),
            rename=rename or (),
            strict=strict,
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
            workers=find_workers(part),
        )
    show(src, done, "consolidated", json=json)
