"""Run `ckptkit reshard`: options in, report out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.cli.consent import Yes, dry_run_option, with_hub_note
from ckptkit.cli.conversion import OPTIONS, chosen_options, show
from ckptkit.cli.output import Json, Quiet, progress_bar
from ckptkit.cli.settings import with_options
from ckptkit.cli.sources import Also, with_others
from ckptkit.io.destination import to_destination
from ckptkit.io.path import to_path

_OTHERS = (
    *("world_size", "under", "optimizer_keys", "max_shard_size", "base", "strict", "merge", "adapter_config"),
    *("from_base", "quantize", "exclude_quantize", "experts_layout", "experts"),
)


@with_options(OPTIONS, leave_out=_OTHERS)
def reshard(
    to: Annotated[int, typer.Option(min=1, metavar="N", help="The number of ranks.")],
    src: Annotated[
        Path | None,
        typer.Argument(
            parser=to_path,
            metavar="SRC",
            help="A checkpoint or a run; by default run/, or else the current directory.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            parser=to_destination, metavar="OUT", help="The directory to write, or a URL; by default SRC-toN."
        ),
    ] = None,
    also: Also = None,
    yes: Yes = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
    **options: Any,
) -> None:
    """Rewrite a checkpoint for another number of ranks.

    Keeps everything, including the optimizer.

    Example: ckptkit reshard run/ckpt-500 --to 16

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or not supported; 4 an I/O failure, OUT is
    unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.reshard import default_source
    from ckptkit.conversion.reshard import reshard as run

    src = with_others(src or default_source(), also) if also else src
    with progress_bar("resharding") as progress:
        done = run(src, out, to=to, **chosen_options(options) | dry_run_option(out, yes=yes), progress=progress)
    show(src, with_hub_note(done, yes=yes), "resharded", json=json)
