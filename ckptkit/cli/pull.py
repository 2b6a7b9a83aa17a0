"""Run `ckptkit pull`: download a checkpoint from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.conversion import Jobs, NoSync, Overwrite
from ckptkit.cli.output import Json, Quiet, pick, print_json, print_table, progress_bar, say
from ckptkit.io.path import to_local
from ckptkit.words import count, format_bytes

if TYPE_CHECKING:
    from ckptkit.hub.pull import Pulled


def pull(
    repository: Annotated[
        str,
        typer.Argument(metavar="ORG/NAME[@REVISION]", help="The repository on the Hub; by default its main branch."),
    ],
    out: Annotated[Path, typer.Argument(parser=to_local, metavar="OUT", help="The local directory to write.")],
    revision: Annotated[str | None, typer.Option(metavar="REVISION", help="A branch, a tag or a commit.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Pull only matching files; repeatable.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Skip matching files; repeatable.")] = None,
    overwrite: Overwrite = False,
    jobs: Jobs = None,
    no_sync: NoSync = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Pull a model or checkpoint from the Hugging Face Hub.

    ckptkit compares every file with the checksum on the Hub.

    OUT appears when all files have arrived. After an interruption, run the same command again to continue.

    Example: ckptkit pull org/model out

    Exit codes: 0 done; 2 usage; 3 no such repository, or a file arrived damaged; 4 the Hub cannot be reached or
    refuses, or an I/O failure; 5 OUT exists, or a name in the repository is unsafe; 130 interrupted.
    """
    from ckptkit.hub.pull import pull as run

    done = run(
        repository,
        out,
        revision=revision,
        include=include or (),
        exclude=exclude or (),
        overwrite=overwrite,
        jobs=jobs,
        sync=not no_sync,
        bars=progress_bar,
    )
    if json:
        print_json(to_json(done))
    else:
        report(done)


def to_json(done: Pulled) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    names = ("revision", "commit", "output", "format", "nbytes", "fetched_bytes", "seconds")
    files = [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()]
    return {"repository": done.repo_id, "files": files, **pick(done, *names)}


def report(done: Pulled) -> None:
    """Print the result for a reader."""
    say(f"pulled {done.repo_id}, {done.revision} at {done.commit[:8]}, into {done.output}")
    rows = [(f"  {name}", format_bytes(nbytes)) for name, nbytes in done.files.items()]
    print_table(
        rows if len(rows) <= 20 else [*rows[:9], (f"  ... {len(rows) - 18} more", ""), *rows[-9:]], ("  file", "size")
    )
    before = done.nbytes - done.fetched_bytes
    here = f"; {format_bytes(before)} were there already" if before else ""
    say(f"{count(len(done.files), 'file')}, {format_bytes(done.nbytes)} in {done.seconds:.2f} s{here}")
    say("every file matches its checksum on the Hub")
    if done.format:
        say(f"next: ckptkit inspect {done.output}")
    else:
        say("note: it contains no checkpoint in a known format")
