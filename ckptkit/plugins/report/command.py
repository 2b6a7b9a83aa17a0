"""Run `ckptkit report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.conversion import Jobs
from ckptkit.cli.options import Also, join_also_directories
from ckptkit.cli.output import Json, pick, print_json, print_text_line, progress_bar
from ckptkit.io.path import to_local_path, to_path
from ckptkit.words import format_bytes


def report(
    run: Annotated[
        Path, typer.Argument(parser=to_path, metavar="RUN", help="The directory that contains the checkpoints.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(parser=to_local_path, metavar="OUT.html", help="The file to write; by default RUN/report.html."),
    ] = None,
    also: Also = None,
    fast: Annotated[bool, typer.Option("--fast", help="Read no tensors: leave out the norms by layer.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT.html even if it is not a report.")
    ] = False,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Write a page about a run, to open in a browser.

    Shows curves, checkpoints, the shard map, the largest tensors, and norms by layer.

    The page is one HTML file that opens from disk. It fetches nothing, runs no script, and prints well. Curves come
    from metrics.jsonl, from a Trainer's trainer_state.json, or else from the metrics of the checkpoints.

    Example: ckptkit report run

    Exit codes: 0 done; 2 usage; 3 RUN is not a run, or its latest checkpoint is damaged; 4 an I/O failure; 5 the file
    exists and is not a report.
    """
    from ckptkit.plugins.report.report import report as run_it

    run = join_also_directories(run, also)
    with progress_bar("report") as progress:
        done = run_it(run, out, fast=fast, overwrite=overwrite, jobs=jobs, progress=progress)
    if json:
        print_json({"output": done.path, **pick(done, "nbytes", "checkpoint")})
    else:
        print_text_line(f"{done.path}: {format_bytes(done.nbytes)}")
