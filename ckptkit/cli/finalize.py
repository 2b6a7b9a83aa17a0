"""Run `ckptkit finalize`: options in, report out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.conversion import Jobs, NoSync, show
from ckptkit.cli.output import Json, Quiet, progress_bar
from ckptkit.io.destination import to_destination


def finalize(
    out: Annotated[
        Path, typer.Argument(parser=to_destination, metavar="OUT", help="The output that --part jobs wrote.")
    ],
    jobs: Jobs = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Finish an output that several jobs wrote with --part.

    First checks that all parts are there.

    Example: ckptkit finalize out

    Exit codes: 0 done; 3 OUT has no parts, or the checkpoint is damaged; 4 an I/O failure; 5 a part is missing or
    still running; 130 interrupted.
    """
    from ckptkit.conversion.finalize import finalize as run

    with progress_bar("finishing") as progress:
        done = run(out, jobs=jobs, sync=not no_sync, progress=progress)
    show(done.source, done, "made", json=json)
