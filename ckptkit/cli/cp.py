"""Run `ckptkit cp`: copy a checkpoint or delta unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.checkpoints.find_components import describe_left
from ckptkit.cli.conversion import NoSync, Overwrite, Source, Yes, dry_run_option, with_hub_note
from ckptkit.cli.output import Json, Quiet, note_used, pick, print_files, print_json, progress_bar, say
from ckptkit.cli.sources import Also, with_others
from ckptkit.io.destination import to_destination

if TYPE_CHECKING:
    from ckptkit.hub.cp import CopiedFiles


def cp(
    src: Source,
    dst: Annotated[
        Path, typer.Argument(parser=to_destination, metavar="DST", help="The directory to write, or a URL.")
    ],
    also: Also = None,
    yes: Yes = False,
    overwrite: Overwrite = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of blocks of 16 MiB that are in memory at once; by default 8."),
    ] = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Copy a checkpoint or delta unchanged, and verify it.

    ckptkit verifies every CRC-32 that the format or a manifest records. DST is complete or absent.
    After an interruption, run the same command again to continue.

    Example: ckptkit cp run/ckpt-500 s3://bucket/run/ckpt-500

    SRC and DST may be local, s3://, gs:// or az://. SRC may also be https:// or hf://org/name. With --yes, DST may also
    be hf://org/name or hf://buckets/org/name/folder. In a store, except in a repository of the Hub, --overwrite first
    removes the old checkpoint: until the copy is complete, there is no checkpoint.

    Exit codes: 0 done; 2 usage; 3 not a checkpoint, or damaged; 4 an I/O failure, or the store refuses; 5 DST exists,
    or another upload is running; 130 interrupted.
    """
    from ckptkit.hub.cp import cp as run

    src = with_others(src, also)
    with progress_bar("copying") as progress:
        options = {"overwrite": overwrite, "sync": not no_sync, **dry_run_option(dst, yes=yes)}
        done = with_hub_note(run(src, dst, jobs=jobs, progress=progress, **options), yes=yes)
    if json:
        print_json(to_json(done))
    else:
        report(src, done)


def to_json(done: CopiedFiles) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    names = ("source", "output", "format", "nbytes", "checked_bytes", "unchecked_bytes", "sent_bytes", "seconds")
    files = [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()]
    left_behind = [pick(entry, "path", "why") for entry in done.left_behind]
    return {"files": files, "left_behind": left_behind, **pick(done, *names, "notes", "dry_run")}


def report(src: Path, done: CopiedFiles) -> None:
    """Print the result for a reader."""
    note_used(src, done.source)
    first, *others = done.summary()
    say(first)
    print_files(done.files)
    notes = [f"note: {text}" for text in done.notes]
    for line in (*others, *notes, *describe_left(done.left_behind, "not copied")):
        say(line)
