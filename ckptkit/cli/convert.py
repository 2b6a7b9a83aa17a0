"""`ckptkit convert`: options in, report out."""

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
    To,
    find_workers,
    show,
)
from ckptkit.cli.output import Json, Quiet, parse_bytes, progress_bar


def convert(
    src: Source,
    out: Out,
    to: To,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks to write DCP for; by default as many as before.")
    ] = None,
    under: Annotated[str, typer.Option(metavar="KEY", help="Put everything under this key, such as model.")] = "",
    dtype: Dtypes = None,
    max_shard_size: MaxShardSize = "5GB",
    include: Include = None,
    exclude: Exclude = None,
    rename: Rename = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    part: Part = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Turn any readable checkpoint into any writable format.

    dcp and pt keep the optimizer and everything else.

    Example: ckptkit convert Llama-3.2-1B start --to dcp --world-size 8 --under model

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or beyond us; 4 an I/O failure, OUT is as it
    was; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.ops.convert import convert as run

    with progress_bar("converting") as progress:
        done = run(
            src,
            out,
            to=to,
            world_size=world_size,
            under=under,
            dtype=dtype or (),
            max_shard_size=parse_bytes(max_shard_size),
            include=include or (),
            exclude=exclude or (),
            rename=rename or (),
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
            workers=find_workers(part),
        )
    show(src, done, "converted", json=json)
