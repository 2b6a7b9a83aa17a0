"""Draw the shard map as SVG: bytes by owner at the top, then a row for each tensor or group of similar tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil

from ckptkit.markup import Markup, element, svg_image
from ckptkit.plugins.report.shards import DrawnShard, Rectangle, Row, ShardMap
from ckptkit.words import count, format_bytes

# Eight colors that color-blind readers can distinguish, readable under dark text on a light or dark page. Their order
# makes a smooth gradient for many owners.
OWNERS = ("#6aa9ec", "#4fb8b3", "#74bd7d", "#c9b84c", "#eba550", "#e58a76", "#dd8abf", "#a794e8")


def owner_color(owner_index: int, count: int) -> str:
    """Return the color of owner `owner_index` of `count`: one of eight, or for more owners a gradient of them."""
    if count <= len(OWNERS):
        return OWNERS[owner_index]
    at = owner_index / (count - 1) * (len(OWNERS) - 1)
    left = min(int(at), len(OWNERS) - 2)
    pairs = zip(rgb_channels(OWNERS[left]), rgb_channels(OWNERS[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - left)):02x}" for a, b in pairs)


def rgb_channels(color: str) -> tuple[int, int, int]:
    """Return red, green and blue of `#rrggbb`, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


# Sizes are in SVG units.
_BARS = 96  # height of the bars with their labels
_HEIGHT = 22  # height of a row; twice that for a tensor sharded along two axes
_ABOVE = 16  # height of a name above its row
_MOST_BARS = 128
_MOST_ROWS = 60
_MOST_IN_ROW = 96  # rectangles in a row; a tensor with more shards has several per rectangle
_MOST_PARTS = 1600  # rectangles in all rows, so that the file stays small
_APART = 8  # space between groups of rows


@dataclass(frozen=True, slots=True)
class MapColumns:
    """The columns of a map: pictures from `left` to `right`, numbers after them, names of at most `letters`.

    Names are left of the pictures, or above them if the map `is_narrow`.
    """

    width: int
    left: int
    right: int
    letters: int
    is_narrow: bool = False


_COLUMNS = MapColumns(960, 396, 790, 58)
_NARROW = MapColumns(360, 0, 290, 46, is_narrow=True)


def draw_shards(shards: ShardMap, *, is_narrow: bool = False) -> Markup:
    """Return the picture for a page that includes the CSS. Shows only the largest rows of many."""
    columns = _NARROW if is_narrow else _COLUMNS
    shown, left_out = shards.split_off_largest_rows(_MOST_ROWS)
    parts = min(max(12, _MOST_PARTS // max(1, len(shown))), _MOST_IN_ROW)
    content: list[Markup] = list(draw_bars(shards, columns))
    top = float(_BARS + 16)
    for start, rows in shards.rows_by_prefix(shown):
        top += _APART
        if start:
            content.append(element("text", shorten(start, columns.width // 8), x=0, y=top + 14, class_="name head"))
            top += _HEIGHT
        for row in rows:
            height = _HEIGHT * (2 if row.cut.is_grid else 1)
            content.append(draw_row(row, start, shards, columns, (top, height), parts))
            top += height + (_ABOVE if is_narrow else 0)
    if left_out:
        tensors = sum(row.repeats for row in left_out)
        what = f"left out: {count(tensors, 'smaller tensor')}, {format_bytes(sum(row.nbytes for row in left_out))}"
        content.append(element("text", what, x=0, y=top + 16))
        top += _HEIGHT
    title = f"Which {shards.by} holds which part of each tensor"
    return svg_image(title, f"-8 -8 {columns.width + 16} {top + 14:.0f}", content)


def as_svg_file(drawn: Markup) -> Markup:
    """Return a picture as a complete SVG file, with its CSS."""
    css = files("ckptkit.plugins.report").joinpath("style.css").read_text()  # loads nothing from the network
    style = element("style", Markup(css + "svg { background: var(--ground) }"))
    return Markup(drawn.replace("</title>", f"</title>{style}", 1) + "\n")


def draw_bars(shards: ShardMap, columns: MapColumns) -> Iterator[Markup]:
    """Draw a bar for the bytes of each owner, or for the largest of several consecutive owners, and the mean."""
    owners = shards.owners
    if not owners:
        return
    full = max(owner.nbytes for owner in owners) or 1
    together = ceil(len(owners) / _MOST_BARS)
    bars = ceil(len(owners) / together)
    step = min(columns.width / bars, 120)
    base, tall = _BARS - 18, _BARS - (54 if columns.is_narrow else 40)
    yield element("text", f"Bytes by {shards.by}", x=0, y=8, class_="title")
    caption = f"{len(owners)} x {format_bytes(shards.mean)} on average, {format_bytes(full)} at most"
    if columns.is_narrow:
        yield element("text", caption, x=0, y=25)
    else:
        yield element("text", caption, x=columns.width, y=8, text_anchor="end")
    for i in range(bars):
        group = owners[i * together : (i + 1) * together]
        most = max(group, key=lambda owner: owner.nbytes)
        height = tall * most.nbytes / full
        name = group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}, at most"
        tip = element("title", f"{name}: {format_bytes(most.nbytes)}")
        fill = owner_color(i * together, len(owners))
        yield element("rect", tip, x=i * step, y=base - height, width=step, height=height, fill=fill, class_="part")
        if step >= 22:
            yield element("text", group[0].mark, x=(i + 0.5) * step, y=base + 14, text_anchor="middle")
    if step < 22:
        yield element("text", owners[0].mark, x=0, y=base + 14)
        yield element("text", owners[-1].mark, x=bars * step, y=base + 14, text_anchor="end")
    mean = base - tall * shards.mean / full
    yield element("line", x1=0, x2=bars * step, y1=mean, y2=mean, class_="mean")


def draw_row(
    row: Row,
    name_prefix: str,
    shards: ShardMap,
    columns: MapColumns,
    top_and_height: tuple[float, float],
    most_shards: int,
) -> Markup:
    """Draw a row: the tensor's name without the prefix `name_prefix`, its shards, how they are cut, and its bytes.

    `top_and_height` is the top of the row and the height of its rectangles. `most_shards` is the maximum number of
    rectangles.
    """
    top, height = top_and_height
    times = f" x{row.repeats}" if row.repeats > 1 else ""
    how = ", ".join(row.remarks)
    name_y = top + height / 2 + 3.5
    if columns.is_narrow:
        times, how = f"{times}  {how}".rstrip(), ""
        name_y, top = top + 12, top + _ABOVE
    middle = top + height / 2 + 3.5
    name = shorten(row.label.removeprefix(name_prefix), max(12, columns.letters - len(times)))
    return element(
        "g",
        element(
            "title", f"{row.label}{times}: {row.spec}, {format_bytes(row.nbytes)}, {count(len(row.shards), 'part')}"
        ),
        element("text", name + times, x=0, y=name_y, class_="name"),
        draw_shard_rectangles(row, shards, columns, (top, height), most_shards),
        element("text", how, x=columns.right + 8, y=middle) if how else None,
        element("text", format_bytes(row.nbytes), x=columns.width, y=middle, text_anchor="end"),
    )


def draw_shard_rectangles(
    row: Row, shards: ShardMap, columns: MapColumns, top_and_height: tuple[float, float], max_rectangles: int
) -> Iterator[Markup]:
    """Draw a rectangle for each shard, or for several consecutive shards if there are more than `max_rectangles`."""
    top, height = top_and_height
    pairs = list(zip(row.cut.rectangles, row.shards, strict=True))
    together = max(1, ceil(len(pairs) / max_rectangles))
    across = columns.right - columns.left
    for at in range(0, len(pairs), together):
        group = pairs[at : at + together]
        area = Rectangle(
            min(rectangle.left for rectangle, _ in group),
            max(rectangle.right for rectangle, _ in group),
            min(rectangle.top for rectangle, _ in group),
            max(rectangle.bottom for rectangle, _ in group),
        )
        x, y = columns.left + area.left * across, top + 2 + area.top * (height - 4)
        width, tall = (area.right - area.left) * across, (area.bottom - area.top) * (height - 4)
        owner = group[0][1].owner
        tip = element("title", describe_rectangle(row, shards, [shard for _, shard in group]))
        fill = owner_color(owner, len(shards.owners))
        yield element("rect", tip, x=x, y=y, width=width, height=tall, fill=fill, class_="part")
        mark = shards.owners[owner].mark
        if len(group) == 1 and width > 8 * len(mark) + 6 and tall > 13:
            yield element("text", mark, x=x + 5, y=y + tall / 2 + 4, class_="on")


def describe_rectangle(row: Row, shards: ShardMap, group: Sequence[DrawnShard]) -> str:
    """Return the tooltip of a rectangle: name, indices, owner, bytes and file; for several shards owners and bytes."""
    first, last = (shards.owners[group[i].owner] for i in (0, -1))
    nbytes = format_bytes(sum(shard.nbytes for shard in group))
    if len(group) > 1:
        return f"{row.label}: {count(len(group), 'part')}, {first.name} to {last.name}, {nbytes}"
    box = group[0].box
    indices = ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True))
    return f"{row.label}[{indices}]: {first.name}, {nbytes}, {group[0].path}"


def shorten(name: str, letters: int) -> str:
    """Return a name shortened to `letters` characters: its start, an ellipsis and its end."""
    if len(name) <= letters:
        return name
    return f"{name[: letters // 3]}…{name[-(letters - letters // 3 - 1) :]}"
