"""Make the chapters of a run's report.

Each function returns the values of one chapter for `report.html`, or None if the chapter has no content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckptkit.cli.pictures.shard_svg import draw_shards
from ckptkit.cli.pictures.shards import ShardMap, is_numeric_component
from ckptkit.layout.counting import Count
from ckptkit.markup import Markup, element, svg_image
from ckptkit.plugins.report.curves import Axis, draw_curves, draw_step_axis
from ckptkit.plugins.report.history import History, Series
from ckptkit.plugins.report.layers import LayerKind, Norms, draw_layers
from ckptkit.runs.ls import Listed, Listing
from ckptkit.words import count, format_brief, format_bytes

_WIDTH, _NARROW, _HEIGHT = 960, 400, 150
_LEFT, _TOP, _BOTTOM = 20, 34, 122  # _LEFT is also the right margin
_MOST = 300


@dataclass(frozen=True, slots=True)
class Stop:
    """A checkpoint on the timeline. `told` is appended to name and size in its tooltip."""

    name: str
    step: int
    nbytes: int
    is_complete: bool
    is_model: bool
    is_pinned: bool
    is_latest: bool
    told: str


def draw_timeline(stops: Sequence[Stop], last_step: float | None = None, *, is_narrow: bool = False) -> Markup:
    """Draw the newest of the checkpoints (at least one); the axis extends to `last_step` if that is later."""
    width = _NARROW if is_narrow else _WIDTH
    shown = sorted(stops, key=lambda stop: stop.step)[-(_MOST // 4 if is_narrow else _MOST) :]
    first = 0 if len(shown) == len(stops) else shown[0].step
    x = Axis(first, max(shown[-1].step, last_step or 0, first + 1), _LEFT, width - _LEFT)
    title = f"{count(len(shown), 'checkpoint')} from step {shown[0].step:,} to {shown[-1].step:,}"
    full = max(stop.nbytes for stop in shown) or 1
    drawn = (draw_stop(stop, x, full) for stop in shown)
    return svg_image(title, f"0 0 {width} {_HEIGHT}", draw_legend(shown, width), draw_step_axis(x, _BOTTOM), drawn)


def draw_legend(shown: Sequence[Stop], width: int) -> Iterator[Markup]:
    """Draw a sample of each kind of checkpoint that the timeline shows."""
    kinds = [("saved", "complete"), ("model", "weights only"), ("unfinished", "not complete")]
    kinds_shown = {css_class(stop) for stop in shown}
    x = float(_LEFT)
    for kind, word in kinds:
        if kind in kinds_shown:
            yield element("rect", x=x, y=2, width=10, height=10, rx=2, class_=kind)
            yield element("text", word, x=x + 16, y=11)
            x += 36 + 6 * len(word)
    if any(stop.is_pinned for stop in shown):
        yield element("circle", cx=x + 5, cy=7, r=3.5, class_="dot b")
        yield element("text", "pinned", x=x + 16, y=11)
    if width > _NARROW:
        yield element("text", "height: bytes on disk", x=width - _LEFT, y=11, text_anchor="end")


def css_class(stop: Stop) -> str:
    """Return the kind of a checkpoint, which is its CSS class."""
    if not stop.is_complete:
        return "unfinished"
    return "model" if stop.is_model else "saved"


def draw_stop(stop: Stop, x: Axis, full: int) -> Markup:
    """Draw a bar with a tooltip, a dot if the checkpoint is pinned, and a label if it is the latest."""
    at = x.coordinate_of(stop.step)
    height = max(4.0, (_BOTTOM - _TOP - 14) * stop.nbytes / full)
    top = _BOTTOM - height
    anchor = "end" if at > (x.start + x.end) / 2 else "start"
    return element(
        "g",
        element("title", f"{stop.name}: {format_bytes(stop.nbytes)}{stop.told}"),
        element("rect", x=at - 4, y=top, width=8, height=height, rx=2, class_=css_class(stop)),
        element("circle", cx=at, cy=top - 6, r=3.5, class_="dot b") if stop.is_pinned else None,
        element("text", "latest", x=at, y=top - 12, text_anchor=anchor, class_="strong") if stop.is_latest else None,
    )


Chapter = dict[str, Any]

_CURVES = (
    ("Loss", ("loss", "eval_loss")),
    ("Learning rate", ("lr",)),
    ("Tokens per second", ("tokens_per_second",)),
    ("Gradient norm", ("grad_norm",)),
    ("Share of the peak FLOP/s", ("mfu",)),
    ("GPU memory", ("memory_allocated", "memory_reserved")),
)
_MAY_BE_LOG = ("Loss", "Gradient norm")
_SAMPLES = 20  # rows of the curves' table
_MOST_LISTED = 12  # checkpoints that are shown unfolded
_MOST_FOLDED = 500
_LARGEST = 12
_MOST_KINDS = 14
_WIDTHS = (False, True)  # is_narrow: every picture is drawn for a screen and for a phone


def training_chapter(history: History) -> Chapter | None:
    """Return the curves, and a table with their values at up to 20 steps."""
    curves = [(title, series_list) for title, names in _CURVES if (series_list := history.drawable_series(*names))]
    drawn = [series for _, series_list in curves for series in series_list]
    if not drawn:
        return None
    steps = sorted({stretch.first for series in drawn for stretch in series.stretches})
    chosen = [*steps[: -1 : max(1, -(-len(steps) // _SAMPLES))], steps[-1]]
    return {
        "lead": describe_history(history, drawn),
        "pictures": [draw_curves(title, series_list, may_be_log=title in _MAY_BE_LOG) for title, series_list in curves],
        "names": ["step", *(series.name.replace("_", " ") for series in drawn)],
        "rows": [[f"{step:,.0f}", *(format_number(series.find_value_at(step)) for series in drawn)] for step in chosen],
    }


def describe_history(history: History, drawn: Sequence[Series]) -> str:
    """Return text on the source of the curves, and on resumed and skipped steps."""
    sentences = [f"From {history.source}."]
    if any(stretch.count > 1 for series in drawn for stretch in series.stretches):
        sentences.append("A line is the mean of consecutive steps, the band reaches from the lowest to the highest.")
    if history.resumed:
        steps = ", ".join(f"{step:,.0f}" for step in history.resumed[-5:])
        sentences.append(f"Went back to step {steps}; each step is shown as last taken.")
    if history.skipped:
        sentences.append(f"Skipped {count(history.skipped, 'line')} without metrics of a step.")
    return " ".join(sentences)


def format_number(value: float | None) -> str:
    return "" if value is None else format_brief(value)


def checkpoints_chapter(listing: Listing, last_step: float | None) -> Chapter | None:
    """Return the timeline and the table of checkpoints, newest first."""
    listed = listing.checkpoints
    if not listed:
        return None
    stops = [timeline_entry(one, one.step, listing) for one in listed if one.step is not None]
    complete, total = sum(one.is_complete for one in listed), format_bytes(sum(one.nbytes for one in listed))
    rows = [(one, saved_date_of(one), state_labels(one, listing)) for one in reversed(listed)]
    return {
        "lead": f"{complete} complete of {len(listed)}, {total} on disk. {listing.tracker or ''}".strip(),
        "timeline": [draw_timeline(stops, last_step, is_narrow=narrow) for narrow in _WIDTHS] if stops else None,
        "metrics": list(dict.fromkeys(name for one in listed for name in one.metrics))[:4],
        "newest": rows[:_MOST_LISTED],
        "older": rows[_MOST_LISTED:][:_MOST_FOLDED],
    }


def timeline_entry(checkpoint: Listed, step: int, listing: Listing) -> Stop:
    """Return the timeline entry of a checkpoint."""
    metrics = [f"{name} {format_brief(value)}" for name, value in list(checkpoint.metrics.items())[:6]]
    told = "".join(f", {word}" for word in (saved_date_of(checkpoint), *metrics, checkpoint.problem) if word)
    is_latest = checkpoint.path == listing.latest
    return Stop(
        checkpoint.path.name,
        step,
        checkpoint.nbytes,
        checkpoint.is_complete,
        checkpoint.is_weights_only,
        checkpoint.is_pinned,
        is_latest,
        told,
    )


def saved_date_of(checkpoint: Listed) -> str:
    """Return when a checkpoint was saved, in UTC."""
    return datetime.fromtimestamp(checkpoint.saved_at, UTC).strftime("%Y-%m-%d %H:%M")


def state_labels(checkpoint: Listed, listing: Listing) -> list[tuple[str, str]]:
    """Return labels for the state of a checkpoint, each with its CSS class."""
    words = [
        ("complete", "good", checkpoint.is_complete),
        (checkpoint.problem or "not complete", "bad", bool(checkpoint.problem) or not checkpoint.is_complete),
        ("latest", "", checkpoint.path == listing.latest),
        ("pinned", "", checkpoint.is_pinned),
        ("weights only", "", checkpoint.is_weights_only),
    ]
    return [(word, kind) for word, kind, holds in words if holds]


def shards_chapter(name: str, shard_map: ShardMap) -> Chapter | None:
    """Return the shard map of checkpoint `name` by rank or file, and its largest tensors."""
    if not shard_map.rows:
        return None
    largest = sorted(shard_map.rows, key=lambda row: -row.spec.nbytes)[:_LARGEST]
    total, most = sum(row.nbytes for row in shard_map.rows) or 1, max(row.nbytes for row in largest) or 1
    return {
        "lead": describe_shards(name, shard_map),
        "picture": [draw_shards(shard_map, is_narrow=narrow) for narrow in _WIDTHS],
        "by": shard_map.by,
        "rows": [
            (owner.name, f"{owner.nbytes:,}", format_bytes(owner.nbytes)) for owner in shard_map.owners[:_MOST_FOLDED]
        ],
        "total": f"Of {count(sum(row.repeats for row in shard_map.rows), 'tensor')}, {format_bytes(total)} in all.",
        "largest": [(row, format_percent(row.nbytes / most), format_percent(row.nbytes / total)) for row in largest],
    }


def format_percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def describe_shards(name: str, shards: ShardMap) -> str:
    """Return text on the shard map."""
    owners = len(shards.owners)
    if owners == 1:
        return f"{name}: one {shards.by} holds everything."
    fullest = max(shards.owners, key=lambda owner: owner.nbytes)
    return (
        f"{name}: which of {owners} {shards.by}s holds which part of each tensor. Tensors that are alike share a row. "
        f"The most is held by {fullest.name}, {fullest.nbytes / (shards.mean or 1):.2f} times the average."
    )


def norms_chapter(measured: Norms) -> Chapter | None:
    """Return a picture of the norms by layer, and tables of the norms by kind of tensor."""
    if not measured.counts:
        return None
    kinds = sorted(measured.kinds, key=lambda kind: -len(kind.by_layer))[:_MOST_KINDS]
    single = [name for name in measured.counts if not any(map(is_numeric_component, name.split(".")[:-1]))][:_LARGEST]
    title = "Norm of the tensors of each layer"
    lead = "The 2-norm of the weights, over all numbers of a tensor."
    if measured.non_finite_tensors:
        first, unsound = measured.non_finite_tensors[0], count(len(measured.non_finite_tensors), "tensor")
        lead += f" NaN or infinity in {unsound}, such as {first}: not counted in their norms."
    return {
        "lead": lead,
        "picture": [draw_layers(title, kinds, is_narrow=narrow) for narrow in _WIDTHS] if kinds else None,
        "single": [norm_row(name, measured.counts[name]) for name in single],
        "kinds": [norm_kind_row(kind) for kind in kinds],
    }


def norm_kind_row(kind: LayerKind) -> list[str]:
    """Return a table row with the range of a kind's norms, and the layers with the minimum and maximum."""
    ends = [choose(kind.by_layer, key=kind.by_layer.__getitem__) for choose in (min, max)]
    extremes = [f"{format_brief(kind.by_layer[layer])} (layer {layer})" for layer in ends]
    return [kind.name, str(len(kind.by_layer)), *extremes]


def norm_row(name: str, counted: Count) -> list[str]:
    """Return a table row with norm, mean, standard deviation, minimum and maximum of a tensor."""
    moments = (counted.moments.norm, counted.moments.mean, counted.moments.deviation)
    extremes = ("" if value is None else format_brief(float(value)) for value in (counted.low, counted.high))
    return [name, *map(format_brief, moments), *extremes]
