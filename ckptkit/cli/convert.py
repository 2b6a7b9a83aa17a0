"""Run `ckptkit convert`: options in, report out."""

from __future__ import annotations

from typing import Any

from ckptkit.cli.consent import Yes, dry_run_option, with_hub_note
from ckptkit.cli.conversion import OPTIONS, Out, Source, ToOrAdapter, chosen_options, show
from ckptkit.cli.output import Json, Quiet, progress_bar
from ckptkit.cli.settings import with_options
from ckptkit.cli.sources import Also, with_others


@with_options(OPTIONS)
def convert(
    src: Source,
    out: Out,
    to: ToOrAdapter = None,
    also: Also = None,
    yes: Yes = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
    **options: Any,
) -> None:
    """Convert a checkpoint to another format.

    The formats dcp and pt keep the optimizer and everything else.

    Example: ckptkit convert Llama-3.2-1B start --to dcp --world-size 8 --under model

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or not supported; 4 an I/O failure, OUT is
    unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.convert import convert as run

    src = with_others(src, also)
    with progress_bar("converting") as progress:
        done = run(src, out, to=to, **chosen_options(options) | dry_run_option(out, yes=yes), progress=progress)
    show(src, with_hub_note(done, yes=yes), "converted", json=json)
