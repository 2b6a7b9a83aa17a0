"""Draw the shard map of `ckptkit inspect`: in the terminal with --shards, as an SVG file with --svg.

Each piece of text has its owner, so that a terminal can color it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from math import ceil
from pathlib import Path

import typer

from ckptkit.cli.output import print_raw_line, print_table, print_text_line, terminal_width
from ckptkit.errors import Occupied
from ckptkit.io.file import is_existing_path
from ckptkit.io.staging import publish_file
from ckptkit.layout import Layout
from ckptkit.plugins.report.shards import Owner, Rectangle, Row, ShardMap, map_shards
from ckptkit.words import count, escape_control_characters, fold_lines, format_bytes

_MOST_ROWS, _MOST_BARS = 32, 16
_WIDTH = 26  # width of a tensor's picture in characters
_INDENT = _WIDTH + 18  # characters before a tensor's name
_COLORS = (117, 216, 150, 222, 183, 80, 211, 250)  # of the 256 terminal colors, light enough for black text
_FILLS = "░▒"  # alternating, so that boundaries of shards are visible without color
_BLOCKS = " ▏▎▍▌▋▊▉█"
_TALLEST = 4  # maximum number of lines of a tensor sharded along two axes
_NARROWEST = 3  # minimum width of a drawn shard in characters; narrower shards are sampled


def print_shard_map(layout: Layout) -> None:
    """Print the shard map: a bar for each rank or file, and a line for each tensor or group of similar tensors."""
    shards = map_shards(layout)
    print_text_line("")
    rows: list[tuple[object, ...]] = []
    for bar in owner_bars(shards, _WIDTH):
        is_one = bar.first is bar.last
        marks = bar.first.mark if is_one else f"{bar.first.mark}-{bar.last.mark}"
        low, high = format_bytes(bar.least), format_bytes(bar.most)
        size = high if low == high else f"{low} to {high}"
        name = (bar.first.name if is_one else f"{bar.first.name} to {bar.last.name}",) if shards.by == "file" else ()
        rows.append((marks, size if is_one else f"{size} each", bar.bar, *name))
    print_table(rows, (shards.by, "bytes", "", *["file"] * (shards.by == "file")))
    if len(shards.owners) > 1:
        fullest = max(shards.owners, key=lambda owner: owner.nbytes)
        times = fullest.nbytes / shards.mean if shards.mean else 1.0
        what = f"{count(len(shards.owners), shards.by)}, {format_bytes(shards.mean)} each on average"
        print_text_line(f"{what}; {shards.by} {fullest.mark} has the most, {times:.2f} times the average")
    print_text_line("")
    shown, left_out = shards.split_off_largest_rows(_MOST_ROWS)
    print_text_line(f"{'part of each rank'.ljust(_WIDTH)}    bytes  parts  tensor")
    for start, alike in shards.rows_by_prefix(shown):
        if start:
            print_text_line(f"{start}".rjust(_INDENT + len(start)))
        for row in alike:
            for line in tensor_lines(row, start, shards):
                print_raw_line(line)
    if left_out:
        tensors = sum(row.repeats for row in left_out)
        nbytes = format_bytes(sum(row.nbytes for row in left_out))
        print_text_line(f"left out: {count(tensors, 'smaller tensor')} of {count(len(left_out), 'kind')}, {nbytes}")


def tensor_lines(row: Row, name_prefix: str, shards: ShardMap) -> Iterator[str]:
    """Yield the lines of a tensor: its picture, its numbers, and its name without the heading's `name_prefix`."""
    numbers = f"  {format_bytes(row.nbytes):>7}  {len(row.shards):>5}  "
    times = f"  x{row.repeats}" if row.repeats > 1 else ""
    remarks = f"  ({', '.join(row.remarks)})" if row.remarks else ""
    name = "  " * bool(name_prefix) + escape_control_characters(row.label.removeprefix(name_prefix)) + times + remarks
    pieces = fold_lines(name, max(24, terminal_width() - _INDENT))
    pictures = draw_tensor_lines(row, shards.owners, _WIDTH)
    for i, (picture, piece) in enumerate(zip_longest(pictures, pieces)):
        painted = render_line(picture) if picture else " " * _WIDTH
        yield f"{painted}{numbers if i == 0 else ' ' * len(numbers)}{piece or ''}".rstrip()


def render_line(line: Line) -> str:
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
    from ckptkit.plugins.report.shard_svg import as_svg_file, draw_shards

    if is_existing_path(dst):
        raise Occupied("there is a file of this name", path=dst, hint="choose another")
    publish_file(dst, as_svg_file(draw_shards(map_shards(layout))).encode())


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of a line, and the position of its owner; None if it has no single owner."""

    text: str
    owner: int | None


Line = tuple[TextSpan, ...]


def draw_tensor_lines(row: Row, owners: Sequence[Owner], width: int) -> list[Line]:
    """Return a tensor as lines of `width` characters: one line, or several if it is sharded along two axes."""
    rectangles = row.cut.rectangles
    if not rectangles:
        return [(TextSpan("(empty)".ljust(width), None),)]
    heights = sorted({rectangle.top for rectangle in rectangles})
    bounds = [*heights, 1.0]
    levels = [(a + b) / 2 for a, b in zip(heights, bounds[1:], strict=True)]
    if len(levels) > _TALLEST:
        levels = [(i + 0.5) / _TALLEST for i in range(_TALLEST)]
    lines = []
    for level in levels:  # the rectangles at this height, left to right; neighbors of the same owner are joined
        crossed = [
            (rectangle, shard.owner)
            for rectangle, shard in zip(rectangles, row.shards, strict=True)
            if rectangle.top <= level < rectangle.bottom
        ]
        crossed.sort(key=lambda pair: pair[0].left)
        joined = [list(group) for _, group in groupby(crossed, key=lambda pair: pair[1])]
        parts = [(Rectangle(group[0][0].left, group[-1][0].right), group[0][1]) for group in joined]
        lines.append(draw_line(parts, owners, width))
    return lines


def draw_line(rectangles_and_owners: Sequence[tuple[Rectangle, int]], owners: Sequence[Owner], width: int) -> Line:
    """Return a line with the shards side by side, each with its owner's mark; see `draw_samples` for many shards."""
    if len(rectangles_and_owners) * _NARROWEST > width:
        return draw_samples(rectangles_and_owners, owners, width)
    ends: list[int] = []
    for i, (part, _) in enumerate(rectangles_and_owners):  # each part gets at least one column
        least, most = (ends[-1] if ends else 0) + 1, width - (len(rectangles_and_owners) - 1 - i)
        ends.append(min(max(round(part.right * width), least), most))
    runs = []
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        owner = rectangles_and_owners[i][1]
        mark = owners[owner].mark
        runs.append(TextSpan((mark if len(mark) <= end - start else "").ljust(end - start, _FILLS[i % 2]), owner))
    return tuple(runs)


def draw_samples(rectangles_and_owners: Sequence[tuple[Rectangle, int]], owners: Sequence[Owner], width: int) -> Line:
    """Return a line for too many shards: each column has the owner of the shard at its center.

    The text shows the first owner's mark, the number of shards, and the last owner's mark.
    """
    first, last = (owners[rectangles_and_owners[i][1]].mark for i in (0, -1))
    middle = f" {len(rectangles_and_owners)} parts ".center(width - len(first) - len(last), _FILLS[0])
    shown = f"{first}{middle}{last}"[:width]
    at, runs = 0, []
    for column, character in enumerate(shown):
        while at < len(rectangles_and_owners) - 1 and rectangles_and_owners[at][0].right <= (column + 0.5) / width:
            at += 1
        runs.append(TextSpan(character, rectangles_and_owners[at][1]))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class Bar:
    """The minimum and maximum bytes of one owner or several consecutive owners, and a bar for the maximum."""

    first: Owner
    last: Owner
    least: int
    most: int
    bar: str


def owner_bars(shards: ShardMap, width: int) -> Iterator[Bar]:
    """Yield a bar of at most `width` characters for each owner, or for several if there are over `_MOST_BARS`."""
    full = max((owner.nbytes for owner in shards.owners), default=0) or 1
    together = ceil(len(shards.owners) / _MOST_BARS)
    for at in range(0, len(shards.owners), max(1, together)):
        group = shards.owners[at : at + together]
        sizes = [owner.nbytes for owner in group]
        eighths = round(max(sizes) / full * width * 8)
        drawn = ("█" * (eighths // 8) + _BLOCKS[eighths % 8]).rstrip()
        yield Bar(group[0], group[-1], min(sizes), max(sizes), drawn)
