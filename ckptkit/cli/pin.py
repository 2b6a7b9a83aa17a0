"""Run `ckptkit pin` and `ckptkit unpin`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.output import Json, print_json, print_note, print_text_line
from ckptkit.cli.sources import Also, each_with_others
from ckptkit.io.path import as_typed, to_live_path


def pin(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            parser=to_live_path, metavar="CHECKPOINT", help="Checkpoints, or runs (their latest complete checkpoint)."
        ),
    ],
    also: Also = None,
    json: Json = False,
) -> None:
    """Protect checkpoints from deletion.

    `ckptkit prune` and ckptkit's own training keep pinned checkpoints. pin refuses a checkpoint if
    `ckptkit verify --fast` finds a problem in it, such as a missing shard.

    A pin is an empty file, or on s3:// an empty object, in the `.pins` directory of the run.

    Example: ckptkit pin run/ckpt-500

    Exit codes: 0 done, or pinned before; 2 usage; 3 not a complete checkpoint, or a damaged one; 4 an I/O failure; 5
    another process is deleting checkpoints of this run.
    """
    from ckptkit.runs.pin import pin as run_it

    pinned = run_it(*each_with_others(checkpoints, also, "pin them one by one"))
    if json:
        print_json({"pinned": pinned})
        return
    for path in pinned:
        print_text_line(f"pinned {as_typed(checkpoints[0], path)}")


def unpin(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(parser=to_live_path, metavar="CHECKPOINT", help="Checkpoints; they need not exist any more."),
    ],
    json: Json = False,
) -> None:
    """Remove the pins of checkpoints.

    After that, the --keep rules decide again whether they stay.

    Example: ckptkit unpin run/ckpt-500

    Exit codes: 0 done, or not pinned; 2 usage; 3 neither pinned nor a checkpoint; 4 an I/O failure.
    """
    from ckptkit.runs.pin import unpin as run_it

    unpinned = run_it(*checkpoints)
    if json:
        print_json({"unpinned": unpinned})
        return
    for path in unpinned:
        print_text_line(f"unpinned {as_typed(checkpoints[0], path)}")
    if not unpinned:
        print_note("note: nothing was pinned here; `ckptkit ls RUN` shows the pins of a run")
