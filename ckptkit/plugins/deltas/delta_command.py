"""Run `ckptkit delta`, and show a delta for `ckptkit inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.conversion import Jobs, NoSync
from ckptkit.cli.output import Json, pick, print_json, print_note, print_table, print_text_line, progress_bar
from ckptkit.io.destination import to_destination
from ckptkit.io.path import to_path
from ckptkit.words import format_bytes

if TYPE_CHECKING:
    from ckptkit.plugins.deltas.delta import WrittenDelta

Base = Annotated[
    Path,
    typer.Argument(
        parser=to_path, metavar="BASE", help="The old checkpoint, or a run (its latest complete checkpoint)."
    ),
]


def delta(
    base: Base,
    new: Annotated[Path, typer.Argument(parser=to_path, metavar="NEW", help="The new checkpoint, of the same model.")],
    out: Annotated[
        Path,
        typer.Argument(
            parser=to_destination, metavar="OUT", help="The directory to write, or a URL: s3://, gs://, az://."
        ),
    ],
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Cast BASE and NEW first; by default, to the dtypes of BASE."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write the delta even if it is larger than 60% of the model.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what ckptkit would write, and write nothing.")
    ] = False,
    jobs: Jobs = None,
    no_sync: NoSync = False,
    json: Json = False,
) -> None:
    """Write what changed between two versions of a model.

    BASE and NEW may have any format and world size. ckptkit compares them bit for bit, after the renames and casts that
    `consolidate` would do.

    Example: ckptkit delta policy-100 run/ckpt-110 delta-110

    `ckptkit apply BASE DELTA OUT` restores the new model. Reinforcement learning changes few elements, because its
    learning rate is small. Other training changes most elements, and then ckptkit refuses to write a delta.

    Exit codes: 0 done; 2 usage; 3 a checkpoint is damaged, the two do not belong to one model, or too much changed; 4
    an I/O failure; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.plugins.deltas.delta import delta as run

    with progress_bar("comparing") as progress:
        done = run(
            base,
            new,
            out,
            dtype=dtype or (),
            force=force,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
        )
    if json:
        print_json(to_json(done))
    else:
        report(done)


def print_summary_and_files(done: WrittenDelta) -> None:
    """Print the summary and the table of written files."""
    first, *further_lines = done.summary()
    print_text_line(first)
    if done.files:
        print_table([(f"  {name}", format_bytes(nbytes)) for name, nbytes in done.files.items()], ("  file", "size"))
    for line in further_lines:
        print_text_line(line)


def to_json(done: WrittenDelta) -> dict[str, Any]:
    """Return the result under the JSON keys that scripts rely on."""
    names = ("base", "new", "output", "density", "nbytes", "checked_bytes", "seconds", "notes")
    files = [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()]
    record = done.record
    return {
        **pick(done, *names),
        "base_id": record.base,
        "new_id": record.new,
        "whole_nbytes": record.nbytes,
        "changed": len(record.tensors),
        "unchanged": record.unchanged,
        "files": files,
        "dry_run": done.dry_run,
    }


def report(done: WrittenDelta) -> None:
    """Print the result as text."""
    print_summary_and_files(done)
    for text in done.notes:
        print_note(f"note: {text}")
