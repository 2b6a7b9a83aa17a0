"""Run `ckptkit prune`, `ckptkit pin` and `ckptkit unpin`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.options import Also, given_settings, join_also_directories, join_also_if_single, with_options
from ckptkit.cli.output import (
    Json,
    format_age,
    pick,
    print_json,
    print_note,
    print_table,
    print_text_line,
    progress_bar,
    to_json_value,
)
from ckptkit.errors import Usage
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import restore_relative_path, to_uncached_path
from ckptkit.settings import Setting, option_name
from ckptkit.words import command_line, format_bytes

if TYPE_CHECKING:
    from ckptkit.runs.prune import Pruned, PruneEntry
    from ckptkit.runs.uploads import OpenUpload

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_WEEK = "7d"  # default of --older: an upload that was idle for this long is stale


_OPTIONS = {
    "keep_last": Setting(int, None, "Keep the last N checkpoints.", "N"),
    "keep_every": Setting(int, None, "Keep checkpoints whose step is a multiple of N.", "N"),
    "keep_best": Setting(str, None, "Keep the N best checkpoints by a metric, such as loss.", "METRIC[:min|max][:N]"),
    "demote": Setting(
        bool,
        False,
        "Do not delete the checkpoints that no rule keeps: replace each by its weights, as a bf16 Hugging Face model.",
    ),
    "jobs": Setting(int, None, "Threads; by default one per core but at most 8.", "N", 1),
}


@with_options(_OPTIONS, insert_before="uploads")
def prune(
    run: Annotated[
        Path,
        typer.Argument(parser=to_uncached_path, metavar="RUN", help="The run: a directory, or s3://bucket/prefix."),
    ],
    also: Also = None,
    uploads: Annotated[
        bool, typer.Option(help="List unfinished uploads to s3://; with --yes, abort them. Deletes no checkpoint.")
    ] = False,
    older: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --uploads: abort uploads that sent nothing for this long; by default 7d."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option(help="Delete. Without --yes, ckptkit only shows what it would delete.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only show what ckptkit would delete; not with --yes.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Delete old checkpoints of a run, or keep only their weights.

    Keeps the checkpoints that a --keep option chooses, the newest one, and pinned ones. Also keeps the checkpoints that
    a latest-checkpoint file names, the trainer's best, and those that a link, an adapter or a delta in the run needs.

    prune also works on s3://, without --demote. There it also finishes interrupted deletions.

    Only complete checkpoints count, with names like ckpt-500, checkpoint-500, step-500, global_step500 or iter_0000500.
    Unfinished or damaged checkpoints and other directories are listed and never deleted.

    With --uploads, prune lists unfinished uploads to s3://, by ckptkit or by other tools. With --yes it aborts uploads
    that sent nothing for 7 days, or for the time in --older, such as 12h. It never deletes complete objects.

    Example: ckptkit prune run --keep-last 3 --keep-every 1000 --keep-best loss:min:2 --yes

    Exit codes: 0 done, or (without --yes) only shown what would happen; 2 usage; 3 RUN is not a run; 4 an I/O failure;
    5 another process is deleting checkpoints of this run; 130 interrupted.
    """
    if yes and dry_run:
        raise Usage("--yes and --dry-run contradict each other", hint="pass one of them")
    if uploads:
        for name, value in {**options, "also": also}.items():
            if value:
                message = f"--uploads cannot be combined with {option_name(name)}"
                raise Usage(message, hint="run the two one after the other")
        prune_and_print_uploads(run, older or _WEEK, yes=yes, json=json)
        return
    if older is not None:
        raise Usage("--older works only with --uploads", hint="use --keep-last N to delete old checkpoints")
    from ckptkit.runs.prune import prune as run_it

    run = join_also_directories(run, also)
    with progress_bar("demote") as progress:
        done = run_it(run, yes=yes, **given_settings(options), progress=progress)
    if json:
        print_json({**to_json_value(done), "freed_bytes": done.freed_bytes})
    else:
        report(done)


def prune_and_print_uploads(run: Path, age: str, *, yes: bool, json: bool) -> None:
    """Print the unfinished uploads, and with `yes` abort those idle for an age such as `7d`, `12h`, `30m` or `90s`."""
    try:
        older = float(age[:-1]) * _UNITS.get(age[-1:], math.nan)
    except ValueError:
        older = math.nan
    if not 0 <= older < math.inf:
        raise Usage(f"expected a time, found `{age}`", hint="write it like 7d, 12h, 30m or 90s")
    from ckptkit.runs.uploads import prune_uploads as run_it

    done = run_it(run, older=older, yes=yes)
    if json:
        result = {"root": done.root, "older": older, "aborted": done.aborted, "freed_bytes": done.freed_bytes}
        stale, keep = list(map(open_upload_json, done.stale)), list(map(open_upload_json, done.keep))
        print_json({**result, "stale": stale, "keep": keep})
        return
    verdict = "aborted" if done.aborted else "abort"
    table = [
        *(upload_row(upload, verdict) for upload in done.stale),
        *(upload_row(upload, "left alone") for upload in done.keep),
    ]
    if table:
        print_table(table, ("upload", "started", "host", "idle", "unfinished", "finished", "verdict"))
    for line in done.summary():
        print_text_line(line)
    if left := sum(upload.whole_bytes for upload in done.stale):
        stays = f"these uploads wrote {format_bytes(left)} of complete objects, which ckptkit does not delete"
        print_note(f"note: {stays}: delete them with the store's own tools")
    if done.stale and not done.aborted:
        print_note("hint: the same with --yes does it")


def open_upload_json(upload: OpenUpload) -> dict[str, Any]:
    fields = pick(upload, "path", "started", "host", "idle_seconds", "sent_bytes", "whole_bytes")
    return {**fields, "claimed": upload.claim is not None, "files": [part.key for part in upload.files]}


def upload_row(upload: OpenUpload, verdict: str) -> tuple[object, ...]:
    sizes = (format_bytes(upload.sent_bytes), format_bytes(upload.whole_bytes) if upload.whole_bytes else "")
    return (upload.path, upload.started, upload.host or "", format_age(upload.idle_seconds), *sizes, verdict)


def report(done: Pruned) -> None:
    """Print which checkpoints are kept, demoted and deleted, and why."""
    past = "d" if done.deleted else ""
    table = [
        *prune_rows(done.keep, "keep"),
        *prune_rows(done.demote, f"demote{past}"),
        *prune_rows(done.delete, f"delete{past}"),
        *prune_rows(done.other, "left alone"),
    ]
    print_table(table, ("checkpoint", "size", "frees", "verdict", "reason"))
    gone = [*done.demote, *done.delete]
    for line in done.summary():
        print_text_line(line)
    if done.deleted or not gone:
        return
    pin = f"; {command_line('pin', gone[0].path)} protects a checkpoint from every rule"
    print_note(f"hint: run the same command with --yes to do it{pin if len(local_paths_of(gone[0].path)) == 1 else ''}")


def prune_rows(entries: Iterable[PruneEntry], verdict: str) -> list[tuple[object, ...]]:
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


def pin(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            parser=to_uncached_path,
            metavar="CHECKPOINT",
            help="Checkpoints, or runs (their latest complete checkpoint).",
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

    pinned = run_it(*join_also_if_single(checkpoints, also, "pin them one by one"))
    if json:
        print_json({"pinned": pinned})
        return
    for path in pinned:
        print_text_line(f"pinned {restore_relative_path(checkpoints[0], path)}")


def unpin(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            parser=to_uncached_path, metavar="CHECKPOINT", help="Checkpoints; they need not exist any more."
        ),
    ],
    json: Json = False,
) -> None:
    """Remove the pins of checkpoints.

    After that, the --keep rules decide again whether they stay.

    Example: ckptkit unpin run/ckpt-500

    Exit codes: 0 done, or not pinned; 2 usage; 3 neither pinned nor a complete checkpoint; 4 an I/O failure.
    """
    from ckptkit.runs.pin import unpin as run_it

    unpinned = run_it(*checkpoints)
    if json:
        print_json({"unpinned": unpinned})
        return
    for path in unpinned:
        print_text_line(f"unpinned {restore_relative_path(checkpoints[0], path)}")
    if not unpinned:
        print_note("note: nothing was pinned here; `ckptkit ls RUN` shows the pins of a run")
