"""Run `ckptkit average`: options in, report out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.cli.consent import Yes, dry_run_option, with_hub_note
from ckptkit.cli.conversion import OF_ONE, OPTIONS, Out, To, chosen_options, parse_factors, show
from ckptkit.cli.output import Json, Quiet, progress_bar
from ckptkit.cli.settings import with_options
from ckptkit.cli.sources import Also, with_others
from ckptkit.errors import Usage
from ckptkit.io.path import to_path


@with_options(OPTIONS, leave_out=(*OF_ONE, "adapter_config", "experts_layout", "experts"))
def average(
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=to_path,
            metavar="SRC",
            help="At least two checkpoints or runs (their latest), or one run with --last.",
        ),
    ],
    out: Out,
    factors: Annotated[
        str,
        typer.Option(
            metavar="F,F,...", help="A factor for each checkpoint; by default all are equal. 3,1 means 0.75,0.25."
        ),
    ] = "",
    last: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Average the last K complete checkpoints of one run.")
    ] = None,
    to: To = "hf",
    also: Also = None,
    yes: Yes = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
    **options: Any,
) -> None:
    """Write the weighted mean of several checkpoints.

    Use it for a model soup, or to smooth the last checkpoints of a run.

    Example: ckptkit average run out --last 5

    All checkpoints must have the same tensors in the same shapes; formats, world sizes and dtypes may differ. ckptkit
    sums in float64 and rounds once at the end. Exit codes: 0 done; 2 usage; 3 a checkpoint is damaged, or the
    checkpoints do not belong to one model; 4 an I/O failure, OUT is unchanged; 5 OUT exists, or a path is unsafe; 130
    interrupted.
    """
    from ckptkit.conversion.average import average as run

    if also and len(sources) > 1:
        raise Usage("--also: expected one run, found several sources", hint="pass one run and --last K")
    sources = [with_others(source, also) for source in sources]
    with progress_bar("averaging") as progress:
        wanted = {"to": to, **chosen_options(options), **dry_run_option(out, yes=yes)}
        done = run(sources, out, weights=parse_factors(factors), last=last, **wanted, progress=progress)
    show(done.source, with_hub_note(done, yes=yes), "averaged", json=json)
