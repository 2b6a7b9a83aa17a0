"""Draw the checkpoints of a run by step as SVG, each as high as it is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptkit.markup import Markup, element, picture
from ckptkit.plugins.report.axes import Axis, draw_labels
from ckptkit.words import count, format_bytes

_WIDTH, _NARROW, _HEIGHT = 960, 400, 150
_LEFT, _TOP, _BOTTOM = 20, 34, 122  # as far from the right edge as from the left one
_MOST = 300


@dataclass(frozen=True, slots=True)
class Stop:
    """A checkpoint on the time line. `told` is text for its tip, after name and size."""

    name: str
    step: int
    nbytes: int
    is_complete: bool
    is_model: bool
    is_pinned: bool
    is_latest: bool
    told: str


def draw_timeline(stops: Sequence[Stop], last_step: float | None = None, *, is_narrow: bool = False) -> Markup:
    """Draw the newest of some checkpoints, of one at least; the line ends at `last_step` if that is later."""
    width = _NARROW if is_narrow else _WIDTH
    shown = sorted(stops, key=lambda stop: stop.step)[-(_MOST // 4 if is_narrow else _MOST) :]
    first = 0 if len(shown) == len(stops) else shown[0].step
    x = Axis(first, max(shown[-1].step, last_step or 0, first + 1), _LEFT, width - _LEFT)
    title = f"{count(len(shown), 'checkpoint')} from step {shown[0].step:,} to {shown[-1].step:,}"
    full = max(stop.nbytes for stop in shown) or 1
    drawn = (draw_stop(stop, x, full) for stop in shown)
    return picture(title, f"0 0 {width} {_HEIGHT}", draw_legend(shown, width), draw_labels(x, _BOTTOM), drawn)


def draw_legend(shown: Sequence[Stop], width: int) -> Iterator[Markup]:
    """Draw a sample of each kind of checkpoint that is shown."""
    kinds = [("saved", "complete"), ("model", "weights only"), ("unfinished", "not complete")]
    there = {kind_of(stop) for stop in shown}
    x = float(_LEFT)
    for kind, word in kinds:
        if kind in there:
            yield element("rect", x=x, y=2, width=10, height=10, rx=2, class_=kind)
            yield element("text", word, x=x + 16, y=11)
            x += 36 + 6 * len(word)
    if any(stop.is_pinned for stop in shown):
        yield element("circle", cx=x + 5, cy=7, r=3.5, class_="dot b")
        yield element("text", "pinned", x=x + 16, y=11)
    if width > _NARROW:
        yield element("text", "height: bytes on disk", x=width - _LEFT, y=11, text_anchor="end")


def kind_of(stop: Stop) -> str:
    """Return the kind of a checkpoint, which is its CSS class."""
    if not stop.is_complete:
        return "unfinished"
    return "model" if stop.is_model else "saved"


def draw_stop(stop: Stop, x: Axis, full: int) -> Markup:
    """Draw a bar, with a dot on it if the checkpoint is pinned, and a word if it is the latest."""
    at = x.place(stop.step)
    height = max(4.0, (_BOTTOM - _TOP - 14) * stop.nbytes / full)
    top = _BOTTOM - height
    anchor = "end" if at > (x.start + x.end) / 2 else "start"
    return element(
        "g",
        element("title", f"{stop.name}: {format_bytes(stop.nbytes)}{stop.told}"),
        element("rect", x=at - 4, y=top, width=8, height=height, rx=2, class_=kind_of(stop)),
        element("circle", cx=at, cy=top - 6, r=3.5, class_="dot b") if stop.is_pinned else None,
        element("text", "latest", x=at, y=top - 12, text_anchor=anchor, class_="strong") if stop.is_latest else None,
    )
