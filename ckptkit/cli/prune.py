"""`ckptkit prune`: which checkpoints of a run stay?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.output import Json, Quiet, count, format_bytes, print_json, print_table, say

if TYPE_CHECKING:
    from ckptkit.ops.prune import Entry, Pruned


def prune(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory that the checkpoints are in.")],
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the last N steps.")] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="N", help="Keep steps that are multiples of N.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max][:N]", help="Keep the N best by a metric, such as loss.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is, and only shown.")] = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Delete old checkpoints of a run: those that no --keep names. The newest always stays.

    Only complete checkpoints count, named like ckpt-500, checkpoint-500, step-500, global_step500 or iter_0000500; what
    is unfinished, damaged or something else is listed and left alone.

    Example: ckptkit prune run --keep-last 3 --keep-every 1000 --keep-best loss:min:2 --yes

    Exit codes: 0 done, or shown what would be; 2 usage; 3 no run is there; 4 an I/O failure; 5 another process is
    deleting checkpoints of this run; 130 interrupted.
    """
    from ckptkit.ops.prune import prune as run_it

    done = run_it(run, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, yes=yes)
    if json:
        print_json(to_json(done))
    else:
        report(done)


def to_json(done: Pruned) -> dict[str, Any]:
    """The result under the keys that scripts rely on."""
    return {
        "keep": [entry_json(entry) for entry in done.keep],
        "delete": [entry_json(entry) for entry in done.delete],
        "other": [entry_json(entry) for entry in done.other],
        "deleted": done.deleted,
        "freed_bytes": done.freed_bytes,
    }


def entry_json(entry: Entry) -> dict[str, Any]:
    """One directory of the result."""
    return {"path": str(entry.path), "step": entry.step, "nbytes": entry.nbytes, "reason": entry.reason}


def report(done: Pruned) -> None:
    """What stays, what goes, and why."""
    went = "deleted" if done.deleted else "delete"
    table = [*rows(done.keep, "keep"), *rows(done.delete, went), *rows(done.other, "left alone")]
    print_table(table, ("checkpoint", "step", "size", "verdict", "reason"))
    what = f"{count(len(done.delete), 'checkpoint')}, {format_bytes(sum(entry.nbytes for entry in done.delete))}"
    if done.deleted:
        say(f"deleted {what}")
    else:
        say(f"to be deleted: {what}; nothing was deleted, for that give --yes")


def rows(entries: Iterable[Entry], verdict: str) -> list[tuple[object, ...]]:
    """Rows of the table."""
    return [
        (entry.path.name, "" if entry.step is None else entry.step, format_bytes(entry.nbytes), verdict, entry.reason)
        for entry in entries
    ]
