"""Draw the shard map of `ckptkit inspect`: in the terminal with --shards, as a file with --svg."""

from __future__ import annotations

import os
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptkit.cli.output import print_line, print_table, say, terminal_width
from ckptkit.errors import Occupied
from ckptkit.io.file import is_there
from ckptkit.io.staging import publish
from ckptkit.words import count, fold_lines, format_bytes, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptkit.cli.pictures.shard_text import Bar, Line
    from ckptkit.cli.pictures.shards import Row, ShardMap
    from ckptkit.layout import Layout

_MOST_ROWS = 32
_WIDTH = 26  # width of a tensor's picture in characters
_INDENT = _WIDTH + 18  # characters before a tensor's name
_COLORS = (117, 216, 150, 222, 183, 80, 211, 250)  # of the 256 terminal colors, light enough for black text


def show_map(layout: Layout) -> None:
    """Print the shard map: a bar for each rank or file, and a line for each tensor or group of similar tensors."""
    from ckptkit.cli.pictures.shards import map_shards

    shards = map_shards(layout)
    say("")
    show_owners(shards)
    shown, left_out = shards.largest(_MOST_ROWS)
    say("")
    say(f"{'part of each rank'.ljust(_WIDTH)}    bytes  parts  tensor")
    for start, rows in shards.headed(shown):
        if start:
            say(f"{start}".rjust(_INDENT + len(start)))
        for row in rows:
            for line in row_lines(row, start, shards):
                print_line(line)
    if left_out:
        tensors = sum(row.repeats for row in left_out)
        nbytes = format_bytes(sum(row.nbytes for row in left_out))
        say(f"left out: {count(tensors, 'smaller tensor')} of {count(len(left_out), 'kind')}, {nbytes}")


def show_owners(shards: ShardMap) -> None:
    """Print the bytes of each rank or file."""
    from ckptkit.cli.pictures.shard_text import bars

    drawn = list(bars(shards, _WIDTH))
    print_table([bar_row(bar, shards.by) for bar in drawn], (shards.by, "bytes", "", *["file"] * (shards.by == "file")))
    if len(shards.owners) > 1:
        fullest = max(shards.owners, key=lambda owner: owner.nbytes)
        times = fullest.nbytes / shards.mean if shards.mean else 1.0
        what = f"{count(len(shards.owners), shards.by)}, {format_bytes(shards.mean)} each on average"
        say(f"{what}; {shards.by} {fullest.mark} has the most, {times:.2f} times the average")


def bar_row(bar: Bar, by: str) -> tuple[object, ...]:
    """Return the table row of an owner, or of several consecutive owners."""
    is_one = bar.first is bar.last
    marks = bar.first.mark if is_one else f"{bar.first.mark}-{bar.last.mark}"
    low, high = format_bytes(bar.least), format_bytes(bar.most)
    size = high if low == high else f"{low} to {high}"
    name = (bar.first.name if is_one else f"{bar.first.name} to {bar.last.name}",) if by == "file" else ()
    return marks, size if is_one else f"{size} each", bar.bar, *name


def row_lines(row: Row, start: str, shards: ShardMap) -> Iterator[str]:
    """Yield the lines of a tensor: its picture, its numbers, and its name, which may wrap.

    `start` is the common prefix in the heading above, which the name does not repeat.
    """
    from ckptkit.cli.pictures.shard_text import draw

    numbers = f"  {format_bytes(row.nbytes):>7}  {len(row.shards):>5}  "
    times = f"  x{row.repeats}" if row.repeats > 1 else ""
    remarks = f"  ({', '.join(row.remarks)})" if row.remarks else ""
    name = "  " * bool(start) + visible(row.label.removeprefix(start)) + times + remarks
    pieces = fold_lines(name, max(24, terminal_width() - _INDENT))
    pictures = draw(row, shards.owners, _WIDTH)
    for i, (picture, piece) in enumerate(zip_longest(pictures, pieces)):
        painted = paint(picture) if picture else " " * _WIDTH
        yield f"{painted}{numbers if i == 0 else ' ' * len(numbers)}{piece or ''}".rstrip()


def paint(line: Line) -> str:
    """Return a line, on a color terminal in the owners' colors instead of fill characters."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return "".join(run.text for run in line)
    return "".join(
        run.text
        if run.owner is None
        else typer.style(run.text.translate({ord("░"): " ", ord("▒"): " "}), fg=16, bg=_COLORS[run.owner % 8])
        for run in line
    )


def write_shard_map(layout: Layout, dst: Path) -> None:
    """Draw the layout of a checkpoint into the SVG file `dst`. Raises `Occupied` if it exists."""
    from ckptkit.cli.pictures.shard_svg import draw_shards, standalone
    from ckptkit.cli.pictures.shards import map_shards

    if is_there(dst):
        raise Occupied("there is a file of this name", path=dst, hint="choose another")
    publish(dst, standalone(draw_shards(map_shards(layout))).encode())
