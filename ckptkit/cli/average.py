"""`ckptkit average`: options in, report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    To,
    checked,
    files_of,
    prospect,
    remarks,
    speed,
)
from ckptkit.cli.conversion import to_json as conversion_json
from ckptkit.cli.output import Json, Quiet, count, parse_bytes, print_json, print_table, progress_bar, say
from ckptkit.errors import Usage
from ckptkit.files.path import to_path

if TYPE_CHECKING:
    from ckptkit.ops.average import Averaged


def average(
    sources: Annotated[
        list[Path],
        typer.Argument(parser=to_path, metavar="SRC", help="A checkpoint, or a run: then its latest. Two at least."),
    ],
    out: Out,
    weights: Annotated[
        str, typer.Option(metavar="W,W,...", help="A weight for each; by default all are equal. 3,1 is 0.75,0.25.")
    ] = "",
    last: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Of one run, its last K complete checkpoints.")
    ] = None,
    to: To = "hf",
    dtype: Dtypes = None,
    max_shard_size: MaxShardSize = "5GB",
    include: Include = None,
    exclude: Exclude = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Make the weighted mean of the models in checkpoints.

    A model soup, or the last of a run smoothed.

    Example: ckptkit average run out --last 5

    The same tensors in the same shapes, of any format, world size and dtype; summed in float64, rounded at the end.
    Exit codes: 0 done; 2 usage; 3 a checkpoint is damaged, or they are not of one model; 4 an I/O failure, OUT is as it
    was; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.ops.average import average as run

    with progress_bar("averaging") as progress:
        done = run(
            sources,
            out,
            weights=parse_weights(weights),
            last=last,
            to=to,
            dtype=dtype or (),
            max_shard_size=parse_bytes(max_shard_size),
            include=include or (),
            exclude=exclude or (),
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
        )
    if json:
        print_json(to_json(done))
    else:
        report(done)


def parse_weights(text: str) -> list[float]:
    """The numbers in `0.5,0.3,0.2`."""
    try:
        return [float(number) for number in text.split(",")] if text else []
    except ValueError:
        raise Usage(f"`{text}` are no weights", hint="write them like 0.5,0.3,0.2") from None


def to_json(done: Averaged) -> dict[str, Any]:
    """The result under the keys that scripts rely on."""
    sources = zip(done.sources, done.weights, strict=True)
    return conversion_json(done) | {"sources": [{"path": str(path), "weight": weight} for path, weight in sources]}


def report(done: Averaged) -> None:
    """The result for a reader."""
    verb = "would average" if done.dry_run else "averaged"
    say(f"{verb} {count(len(done.sources), 'checkpoint')} into {done.output}")
    rows = [(f"  {weight:.4g}", path) for path, weight in zip(done.sources, done.weights, strict=True)]
    print_table(rows, ("  weight", "checkpoint"))
    print_table(files_of(done), ("  file", "size"))
    for line in remarks(done):
        say(line)
    if done.dry_run:
        say(prospect(done))
    else:
        say(speed(done))
        say(checked(done))
