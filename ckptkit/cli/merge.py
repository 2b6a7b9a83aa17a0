"""Run `ckptkit merge`: options in, report out."""

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
from ckptkit.io.path import to_model_path, to_path


@with_options(OPTIONS, leave_out=(*OF_ONE, "experts", "names", "map", "vocab_size"))
def merge(
    model: Annotated[
        Path, typer.Argument(parser=to_model_path, metavar="BASE", help="The model, or its id on the Hub.")
    ],
    adapters: Annotated[
        list[Path],
        typer.Argument(
            parser=to_path, metavar="ADAPTER", help="A saved adapter, or a training checkpoint that contains one."
        ),
    ],
    out: Out,
    factors: Annotated[str, typer.Option(metavar="F,F,...", help="A factor for each adapter; by default 1.")] = "",
    to: To = "hf",
    also: Also = None,
    yes: Yes = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
    **options: Any,
) -> None:
    """Merge LoRA adapters into their base.

    Works block by block: a whole model is never in memory.

    Example: ckptkit merge meta-llama/Llama-3.1-8B run/checkpoint-500 out

    ckptkit computes each weight in float32 and rounds it once. If the checkpoint contains the base, use `ckptkit
    consolidate --merge`. Exit codes: 0 done; 2 usage; 3 an adapter is damaged, does not fit, or uses an unknown method;
    4 an I/O failure, OUT is unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.merge import merge as run

    if also and len(adapters) > 1:
        raise Usage(
            "--also: expected one adapter, found several",
            hint="`ckptkit consolidate ADAPTER OUT --also DIR` makes one directory of each",
        )
    adapters = [with_others(adapter, also) for adapter in adapters]
    with progress_bar("merging") as progress:
        wanted = {"to": to, **chosen_options(options), **dry_run_option(out, yes=yes)}
        done = run(model, adapters, out, weights=parse_factors(factors), **wanted, progress=progress)
    show(model, with_hub_note(done, yes=yes), "merged", json=json)
