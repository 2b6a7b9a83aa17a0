"""Draw the shard map as lines of text. Each piece of text has its owner, so that a terminal can color it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from ckptkit.cli.pictures.shards import Owner, Rectangle, Row, ShardMap

_FILLS = "░▒"  # alternating, so that boundaries of shards are visible without color
_BLOCKS = " ▏▎▍▌▋▊▉█"
_TALLEST = 4  # maximum number of lines of a tensor sharded along two axes
_NARROWEST = 3  # minimum width of a drawn shard in characters; narrower shards are sampled


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of a line, and the position of its owner; None if it has no single owner."""

    text: str
    owner: int | None


Line = tuple[TextSpan, ...]


def draw(row: Row, owners: Sequence[Owner], width: int) -> list[Line]:
    """Return a tensor as lines of `width` characters: one line, or several if it is sharded along two axes."""
    rectangles = row.cut.rectangles
    if not rectangles:
        return [(TextSpan("(empty)".ljust(width), None),)]
    heights = sorted({rectangle.top for rectangle in rectangles})
    bounds = [*heights, 1.0]
    levels = [(a + b) / 2 for a, b in zip(heights, bounds[1:], strict=True)]
    if len(levels) > _TALLEST:
        levels = [(i + 0.5) / _TALLEST for i in range(_TALLEST)]
    return [draw_line(rectangles_at(row, level), owners, width) for level in levels]


def rectangles_at(row: Row, level: float) -> list[tuple[Rectangle, int]]:
    """Return the rectangles at height `level`, left to right, with their owners. Joins neighbors of the same owner."""
    crossed = [
        (rectangle, shard.owner)
        for rectangle, shard in zip(row.cut.rectangles, row.shards, strict=True)
        if rectangle.top <= level < rectangle.bottom
    ]
    crossed.sort(key=lambda pair: pair[0].left)
    joined = [list(group) for _, group in groupby(crossed, key=lambda pair: pair[1])]
    return [(Rectangle(group[0][0].left, group[-1][0].right), group[0][1]) for group in joined]


def draw_line(parts: Sequence[tuple[Rectangle, int]], owners: Sequence[Owner], width: int) -> Line:
    """Return a line with the shards side by side, each with its owner's mark; see `draw_samples` for many shards."""
    if len(parts) * _NARROWEST > width:
        return draw_samples(parts, owners, width)
    ends = share_columns([part.right for part, _ in parts], width)
    runs = []
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        owner = parts[i][1]
        mark = owners[owner].mark
        runs.append(TextSpan((mark if len(mark) <= end - start else "").ljust(end - start, _FILLS[i % 2]), owner))
    return tuple(runs)


def share_columns(fractions: Sequence[float], width: int) -> list[int]:
    """Return the end columns of parts that end at these fractions of the width. Each part gets at least one column."""
    ends: list[int] = []
    for i, fraction in enumerate(fractions):
        least, most = (ends[-1] if ends else 0) + 1, width - (len(fractions) - 1 - i)
        ends.append(min(max(round(fraction * width), least), most))
    return ends


def draw_samples(parts: Sequence[tuple[Rectangle, int]], owners: Sequence[Owner], width: int) -> Line:
    """Return a line for too many shards: each column has the owner of the shard at its center.

    The text shows the first owner's mark, the number of shards, and the last owner's mark.
    """
    first, last = (owners[parts[i][1]].mark for i in (0, -1))
    middle = f" {len(parts)} parts ".center(width - len(first) - len(last), _FILLS[0])
    shown = f"{first}{middle}{last}"[:width]
    at, runs = 0, []
    for column, character in enumerate(shown):
        while at < len(parts) - 1 and parts[at][0].right <= (column + 0.5) / width:
            at += 1
        runs.append(TextSpan(character, parts[at][1]))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class Bar:
    """The minimum and maximum bytes of one owner or several consecutive owners, and a bar for the maximum."""

    first: Owner
    last: Owner
    least: int
    most: int
    bar: str


def bars(shards: ShardMap, width: int, most_bars: int = 16) -> Iterator[Bar]:
    """Yield a bar for each owner, or for several owners each if there are more than `most_bars`.

    The longest bar has `width` characters.
    """
    full = max((owner.nbytes for owner in shards.owners), default=0) or 1
    together = ceil(len(shards.owners) / most_bars)
    for at in range(0, len(shards.owners), max(1, together)):
        group = shards.owners[at : at + together]
        sizes = [owner.nbytes for owner in group]
        yield Bar(group[0], group[-1], min(sizes), max(sizes), bar(max(sizes) / full, width))


def bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    return ("█" * (eighths // 8) + _BLOCKS[eighths % 8]).rstrip()
