"""Run `ckptkit ls`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.options import Also, join_also_directories
from ckptkit.cli.output import (
    Json,
    format_age,
    pick,
    print_json,
    print_note,
    print_table,
    print_text_line,
    terminal_width,
)
from ckptkit.errors import names_and_more
from ckptkit.io.path import to_path
from ckptkit.words import command_line, count, escape_control_characters, format_bytes

if TYPE_CHECKING:
    from ckptkit.runs.ls import Listed, Listing

_COLUMN = 9  # minimum width of a metric's column, in characters


def ls(
    run: Annotated[Path, typer.Argument(parser=to_path, metavar="RUN", help="The run: a directory or a URL.")],
    also: Also = None,
    json: Json = False,
) -> None:
    """List the checkpoints of a run.

    The oldest comes first. Shows age, ranks, size, whether each is complete, and its metrics.

    ckptkit finds checkpoints by the names that trainers give them: ckpt-500, checkpoint-500, step-500, global_step500,
    iter_0000500, ep1-ba500, epoch=1-step=500.ckpt. It looks only at names, sizes, and metadata of up to 8 MiB: to check
    the data, run `ckptkit verify`.

    In a store, ls also shows unfinished uploads and deletions: their process may still be running, or may have died.

    Example: ckptkit ls run

    Exit codes: 0 done; 2 usage; 3 no checkpoint is there; 4 an I/O failure; 5 an unsafe path.
    """
    from ckptkit.runs.ls import ls as list_checkpoints

    run = join_also_directories(run, also)
    listing = list_checkpoints(run)
    if json:
        print_json(to_json(listing))
    else:
        report(listing, run)


def to_json(listing: Listing) -> dict[str, Any]:
    names = ("path", "step", "world_size", "nbytes", "saved_at", "metrics", "format", "trainer", "problem", "named_by")
    listed = [
        {
            **pick(checkpoint, *names, "sizes_compared"),
            "claim": None if checkpoint.claim is None else pick(checkpoint.claim, "kind", "started", "host"),
            "complete": checkpoint.is_complete,
            "pinned": checkpoint.is_pinned,
            "latest": checkpoint.path == listing.latest,
            "weights_only": checkpoint.is_weights_only,
        }
        for checkpoint in listing.checkpoints
    ]
    return {**pick(listing, "root", "latest", "tracker"), "checkpoints": listed}


def report(listing: Listing, run: Path) -> None:
    """Print the table, and hints about the next commands."""
    fixed, marks = [], []
    for checkpoint in listing.checkpoints:
        state = "weights only" if checkpoint.is_weights_only and checkpoint.is_complete else "complete"
        if checkpoint.claim is None:
            state = checkpoint.problem or state
        else:  # an unfinished upload or deletion
            claim = checkpoint.claim.describe()
            state = f"{state}; {claim}" if checkpoint.is_complete else claim
        age = format_age(time.time() - checkpoint.saved_at) if checkpoint.saved_at else ""
        ranks = "" if checkpoint.world_size is None else str(checkpoint.world_size)
        fixed.append([checkpoint.name, age, ranks, format_bytes(checkpoint.nbytes), state])
        labels = ["latest"] if checkpoint.path == listing.latest else []
        labels += ["pinned"] if checkpoint.is_pinned else []
        marks.append(", ".join([*labels, *(f"`{name}`" for name in checkpoint.named_by)]))
    header = ["checkpoint", "age", "ranks", "size", "state"]
    shown, hidden = split_fitting_metrics(listing.checkpoints, [header, *fixed], marks)
    rows = []
    for row, checkpoint, mark in zip(fixed, listing.checkpoints, marks, strict=True):
        values = (checkpoint.metrics.get(name) for name in shown)
        rows.append([*row, *("" if value is None else f"{value:.4g}" for value in values), mark])
    print_table(rows, [*header, *shown, ""])
    total = format_bytes(sum(checkpoint.nbytes for checkpoint in listing.checkpoints))
    print_text_line(f"{count(len(listing.checkpoints), 'checkpoint')}, {total}")
    print_hints(listing, run, hidden)


def print_hints(listing: Listing, run: Path, omitted_columns: Sequence[str]) -> None:
    """Print notes about facts that the table does not show, and hints about the next commands."""
    if listing.tracker:
        print_note(f"note: {listing.tracker}")
    if omitted_columns:
        print_note(f"note: also measured: {', '.join(omitted_columns)}; --json has all")
    if listing.root != run:
        print_note(f"note: this is one checkpoint: {command_line('inspect', run)} shows what is in it")
    for inside in listing.runs:
        print_note(f"note: {inside} is a run: {command_line('ls', inside)} lists its checkpoints")
    blind = [one.name for one in listing.checkpoints if one.is_complete and not one.sizes_compared]
    if blind:
        print_note(f"note: not compared with their metadata: the sizes of {names_and_more(blind, 3)}")
    claims = [checkpoint.claim for checkpoint in listing.checkpoints if checkpoint.claim]
    if any(not claim.is_deletion for claim in claims):
        uploads = command_line("prune", "--uploads", listing.root)
        print_note(f"hint: {uploads} lists uploads; with --yes it aborts the stale ones")
    if any(claim.is_deletion for claim in claims):
        prune = command_line("prune", listing.root, "--keep-last", "N", "--yes")
        print_note(f"hint: {prune} finishes an interrupted deletion")
    for checkpoint in listing.checkpoints:
        if not checkpoint.is_complete and checkpoint.claim is None:
            print_note(f"hint: {command_line('verify', checkpoint.path)} lists the problems")
            return


def split_fitting_metrics(
    checkpoints: Sequence[Listed], table: Sequence[Sequence[str]], marks: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the metrics that fit beside a table, the most frequent first, and the metrics that do not fit."""
    names = list(dict(Counter(name for checkpoint in checkpoints for name in checkpoint.metrics).most_common()))
    used = sum(max(len(escape_control_characters(row[i])) for row in table) + 2 for i in range(len(table[0])))
    room = terminal_width() - used - min(max(map(len, marks), default=0), 24)
    shown: list[str] = []
    for name in names:
        room -= max(len(escape_control_characters(name)), _COLUMN) + 2
        if room < 0:
            break
        shown.append(name)
    return shown, names[len(shown) :]
