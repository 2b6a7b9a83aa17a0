"""Run `ckptkit cp`, which copies a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.checkpoints.find_components import describe_not_copied
from ckptkit.cli.conversion import Source, Yes, hub_dry_run_option, shared_options, with_hub_note
from ckptkit.cli.options import Also, given_settings, join_also_directories, with_options
from ckptkit.cli.output import Json, pick, print_files, print_json, print_text_line, print_used_checkpoint, progress_bar
from ckptkit.io.destination import to_destination
from ckptkit.settings import Setting

_CP_OPTIONS = {
    **shared_options("overwrite", "sync"),
    "jobs": Setting(int, None, "Number of blocks of 16 MiB that are in memory at once; by default 8.", "N", 1),
}


@with_options(_CP_OPTIONS)
def cp(
    src: Source,
    dst: Annotated[
        Path, typer.Argument(parser=to_destination, metavar="DST", help="The directory to write, or a URL.")
    ],
    also: Also = None,
    yes: Yes = False,
    json: Json = False,
    **options: Any,
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
    from ckptkit.runs.cp import cp as run

    src = join_also_directories(src, also)
    with progress_bar("copying") as progress:
        chosen = given_settings(options) | hub_dry_run_option(dst, yes=yes)
        done = with_hub_note(run(src, dst, **chosen, progress=progress), yes=yes)
    if json:
        names = ("source", "output", "format", "nbytes", "checked_bytes", "unchecked_bytes", "sent_bytes", "seconds")
        files = [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()]
        left_behind = [pick(entry, "path", "why") for entry in done.left_behind]
        print_json({"files": files, "left_behind": left_behind, **pick(done, *names, "notes", "dry_run")})
        return
    print_used_checkpoint(src, done.source)
    first, *others = done.summary()
    print_text_line(first)
    print_files(done.files)
    notes = [f"note: {text}" for text in done.notes]
    for line in (*others, *notes, *describe_not_copied(done.left_behind, "not copied")):
        print_text_line(line)
