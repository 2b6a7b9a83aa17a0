"""Return the colors of owners, and the style sheet of pictures."""

from __future__ import annotations

from importlib.resources import files

# Eight that are told apart with any eyes, and dark letters on them, on either ground; next to each other where many
# owners run from one end to the other.
OWNERS = ("#6aa9ec", "#4fb8b3", "#74bd7d", "#c9b84c", "#eba550", "#e58a76", "#dd8abf", "#a794e8")


def read_style() -> str:
    """Return the CSS of pictures, which fetches nothing."""
    return files("ckptkit.cli.pictures").joinpath("style.css").read_text()


def color(position: int, count: int) -> str:
    """Return the color of one of `count` owners: one each where they are few, else a blend along the whole row."""
    if count <= len(OWNERS):
        return OWNERS[position]
    place = position / (count - 1) * (len(OWNERS) - 1)
    left = min(int(place), len(OWNERS) - 2)
    pairs = zip(channels(OWNERS[left]), channels(OWNERS[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - left)):02x}" for a, b in pairs)


def channels(color: str) -> tuple[int, int, int]:
    """Return red, green and blue of `#rrggbb`, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
