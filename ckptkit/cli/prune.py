"""Run `ckptkit prune`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit.cli.output import Json, Quiet, note, plain, print_json, print_table, progress_bar, say
from ckptkit.cli.sources import Also, with_others
from ckptkit.errors import Usage
from ckptkit.files.joined import roots_of
from ckptkit.files.path import to_local
from ckptkit.pictures.numbers import format_bytes

if TYPE_CHECKING:
    from ckptkit.ops.prune import Pruned, PruneEntry


def prune(
    run: Annotated[
        Path, typer.Argument(parser=to_local, metavar="RUN", help="The directory that the checkpoints are in.")
    ],
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the last N steps.")] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="N", help="Keep steps that are multiples of N.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max][:N]", help="Keep the N best by a metric, such as loss.")
    ] = None,
    demote: Annotated[
        bool, typer.Option("--demote", help="Delete no checkpoint: leave its weights, as a bf16 Hugging Face model.")
    ] = False,
    also: Also = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it nothing is done, and only shown.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, as without --yes; not together with it.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Threads; by default one per core.")] = None,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Delete or demote old checkpoints of a run.

    That is those that no --keep names. The newest always stays, and so does what is pinned.

    Only complete checkpoints count, named like ckpt-500, checkpoint-500, step-500, global_step500 or iter_0000500; what
    is unfinished, damaged or something else is listed and left alone.

    Example: ckptkit prune run --keep-last 3 --keep-every 1000 --keep-best loss:min:2 --yes

    Exit codes: 0 done, or shown what would be; 2 usage; 3 no run is there; 4 an I/O failure; 5 another process is
    deleting checkpoints of this run; 130 interrupted.
    """
    from ckptkit.ops.prune import prune as run_it

    if yes and dry_run:
        raise Usage("--yes and --dry-run contradict each other", hint="pass one of them")
    run = with_others(run, also)
    with progress_bar("demote") as progress:
        done = run_it(
            run,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            demote=demote,
            yes=yes,
            jobs=jobs,
            progress=progress,
        )
    if json:
        print_json({**plain(done), "freed_bytes": done.freed_bytes})
    else:
        report(done)


def report(done: Pruned) -> None:
    """Print what stays, what goes, and why."""
    past = "d" if done.deleted else ""
    table = [
        *rows(done.keep, "keep"),
        *rows(done.demote, f"demote{past}"),
        *rows(done.delete, f"delete{past}"),
        *rows(done.other, "left alone"),
    ]
    print_table(table, ("checkpoint", "size", "frees", "verdict", "reason"))
    gone = [*done.demote, *done.delete]
    for line in done.summary():
        say(line)
    if done.deleted or not gone:
        return
    pin = f"; `ckptkit pin {gone[0].path}` would keep one whatever the rules say"
    note(f"hint: the same with --yes does it{pin if len(roots_of(gone[0].path)) == 1 else ''}")


def rows(entries: Iterable[PruneEntry], verdict: str) -> list[tuple[object, ...]]:
    """Return rows of the table."""
    return [
        (
            entry.path.name,
            format_bytes(entry.nbytes),
            format_bytes(entry.freed_bytes) if entry.freed_bytes else "",
            verdict,
            entry.reason,
        )
        for entry in entries
    ]
