"""Run `ckptkit apply`: deltas on the checkpoint that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.conversion import Jobs, NoSync, Overwrite, show
from ckptkit.cli.output import Json, Quiet, progress_bar
from ckptkit.errors import Usage
from ckptkit.files.path import to_path


def apply(
    paths: Annotated[
        list[Path],
        typer.Argument(
            parser=to_path, metavar="BASE DELTA... OUT", help="The checkpoint before, deltas, the directory to make."
        ),
    ],
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Cast BASE first, as consolidate does, if the delta was made so."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, and write nothing.")] = False,
    jobs: Jobs = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Apply deltas to their base, and write the result.

    OUT becomes a Hugging Face model, with the shards, config and tokenizer of BASE, and the weights that `consolidate`
    makes of the checkpoint that the last delta was made to.

    Example: ckptkit apply policy-100 delta-110 delta-120 policy-120

    ckptkit checks that BASE is the base of the first delta, that each delta follows the one before, and all that the
    deltas hold, before it writes anything. The CRC-32 of every tensor of OUT is compared with that in the delta.

    Exit codes: 0 done; 2 usage; 3 another base, a gap between deltas, or a damaged delta; 4 an I/O failure, OUT is as
    it was; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.ops.apply import apply as run

    if len(paths) < 3:
        raise Usage(f"expected a base, deltas and an output, found {len(paths)} of them", hint="run with --help")
    base, *deltas, out = paths
    with progress_bar("applying") as progress:
        done = run(
            base,
            deltas,
            out,
            dtype=dtype or (),
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
        )
    show(base, done, "patched", json=json)
