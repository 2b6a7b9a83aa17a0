"""Make the chapters of a run's report.

Each function returns the values of one chapter for `report.html`, or None if the chapter has no content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ckptkit.engine.counting import Count
from ckptkit.markup import Markup, element, svg_image
from ckptkit.plugins.report.curves import Axis, draw_curves, draw_step_axis
from ckptkit.plugins.report.history import History
from ckptkit.plugins.report.layers import draw_layers, norms_by_layer
from ckptkit.plugins.report.shard_svg import draw_shards
from ckptkit.plugins.report.shards import ShardMap, is_numeric_component
from ckptkit.runs.ls import Listed, Listing
from ckptkit.words import count, format_brief, format_bytes

_WIDTH, _NARROW, _HEIGHT = 960, 400, 150
_LEFT, _TOP, _BOTTOM = 20, 34, 122  # _LEFT is also the right margin
_MOST = 300


def draw_timeline(listing: Listing, last_step: float | None = None, *, is_narrow: bool = False) -> Markup:
    """Draw the newest checkpoints that have a step (at least one does); the axis extends to `last_step` if later."""
    width = _NARROW if is_narrow else _WIDTH
    stops = [(one.step, one) for one in listing.checkpoints if one.step is not None]
    stops.sort(key=lambda stop: stop[0])
    shown = stops[-(_MOST // 4 if is_narrow else _MOST) :]
    first, last = shown[0][0], shown[-1][0]
    start = 0 if len(shown) == len(stops) else first
    x = Axis(start, max(last, last_step or 0, start + 1), _LEFT, width - _LEFT)
    title = f"{count(len(shown), 'checkpoint')} from step {first:,} to {last:,}"
    full = max(one.nbytes for _, one in shown) or 1
    drawn = (draw_checkpoint_bar(one, step, x, full, is_latest=one.path == listing.latest) for step, one in shown)
    legend = draw_legend([one for _, one in shown], width)
    return svg_image(title, f"0 0 {width} {_HEIGHT}", legend, draw_step_axis(x, _BOTTOM), drawn)


def draw_legend(shown: Sequence[Listed], width: int) -> Iterator[Markup]:
    """Draw a sample of each kind of checkpoint that the timeline shows."""
    kinds = [("saved", "complete"), ("model", "weights only"), ("unfinished", "not complete")]
    kinds_shown = set(map(css_class, shown))
    x = float(_LEFT)
    for kind, word in kinds:
        if kind in kinds_shown:
            yield element("rect", x=x, y=2, width=10, height=10, rx=2, class_=kind)
            yield element("text", word, x=x + 16, y=11)
            x += 36 + 6 * len(word)
    if any(one.is_pinned for one in shown):
        yield element("circle", cx=x + 5, cy=7, r=3.5, class_="dot b")
        yield element("text", "pinned", x=x + 16, y=11)
    if width > _NARROW:
        yield element("text", "height: bytes on disk", x=width - _LEFT, y=11, text_anchor="end")


def css_class(checkpoint: Listed) -> str:
    """Return the kind of a checkpoint, which is its CSS class."""
    if not checkpoint.is_complete:
        return "unfinished"
    return "model" if checkpoint.is_weights_only else "saved"


def draw_checkpoint_bar(checkpoint: Listed, step: int, x: Axis, largest_nbytes: int, *, is_latest: bool) -> Markup:
    """Draw a bar with a tooltip, a dot if the checkpoint is pinned, and a label if it is the latest."""
    at = x.coordinate_of(step)
    height = max(4.0, (_BOTTOM - _TOP - 14) * checkpoint.nbytes / largest_nbytes)
    top = _BOTTOM - height
    metrics = [f"{name} {format_brief(value)}" for name, value in list(checkpoint.metrics.items())[:6]]
    facts = [format_bytes(checkpoint.nbytes), saved_date_of(checkpoint), *metrics, checkpoint.problem]
    anchor = "end" if at > (x.start + x.end) / 2 else "start"
    return element(
        "g",
        element("title", f"{checkpoint.path.name}: {', '.join(filter(None, facts))}"),
        element("rect", x=at - 4, y=top, width=8, height=height, rx=2, class_=css_class(checkpoint)),
        element("circle", cx=at, cy=top - 6, r=3.5, class_="dot b") if checkpoint.is_pinned else None,
        element("text", "latest", x=at, y=top - 12, text_anchor=anchor, class_="strong") if is_latest else None,
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
    sentences = [f"From {history.source}."]
    if any(stretch.count > 1 for series in drawn for stretch in series.stretches):
        sentences.append("A line is the mean of consecutive steps, the band reaches from the lowest to the highest.")
    if history.resumed:
        resumed = ", ".join(f"{step:,.0f}" for step in history.resumed[-5:])
        sentences.append(f"Went back to step {resumed}; each step is shown as last taken.")
    if history.skipped:
        sentences.append(f"Skipped {count(history.skipped, 'line')} without metrics of a step.")
    return {
        "lead": " ".join(sentences),
        "pictures": [draw_curves(title, series_list, may_be_log=title in _MAY_BE_LOG) for title, series_list in curves],
        "names": ["step", *(series.name.replace("_", " ") for series in drawn)],
        "rows": [[f"{step:,.0f}", *(series.format_value_at(step) for series in drawn)] for step in chosen],
    }


def checkpoints_chapter(listing: Listing, last_step: float | None) -> Chapter | None:
    """Return the timeline and the table of checkpoints, newest first."""
    listed = listing.checkpoints
    if not listed:
        return None
    has_steps = any(one.step is not None for one in listed)
    complete, total = sum(one.is_complete for one in listed), format_bytes(sum(one.nbytes for one in listed))
    rows = []
    for one in reversed(listed):
        states = [  # label, CSS class, and whether it holds
            ("complete", "good", one.is_complete),
            (one.problem or "not complete", "bad", bool(one.problem) or not one.is_complete),
            ("latest", "", one.path == listing.latest),
            ("pinned", "", one.is_pinned),
            ("weights only", "", one.is_weights_only),
        ]
        rows.append((one, saved_date_of(one), [(label, kind) for label, kind, holds in states if holds]))
    return {
        "lead": f"{complete} complete of {len(listed)}, {total} on disk. {listing.tracker or ''}".strip(),
        "timeline": [draw_timeline(listing, last_step, is_narrow=narrow) for narrow in _WIDTHS] if has_steps else None,
        "metrics": list(dict.fromkeys(name for one in listed for name in one.metrics))[:4],
        "newest": rows[:_MOST_LISTED],
        "older": rows[_MOST_LISTED:][:_MOST_FOLDED],
    }


def saved_date_of(checkpoint: Listed) -> str:
    """Return when a checkpoint was saved, in UTC."""
    return datetime.fromtimestamp(checkpoint.saved_at, UTC).strftime("%Y-%m-%d %H:%M")


def shards_chapter(name: str, shard_map: ShardMap) -> Chapter | None:
    """Return the shard map of checkpoint `name` by rank or file, and its largest tensors."""
    if not shard_map.rows:
        return None
    largest = sorted(shard_map.rows, key=lambda row: -row.spec.nbytes)[:_LARGEST]
    total, most = sum(row.nbytes for row in shard_map.rows) or 1, max(row.nbytes for row in largest) or 1
    owners = len(shard_map.owners)
    lead = f"{name}: one {shard_map.by} holds everything."
    if owners != 1:
        fullest = max(shard_map.owners, key=lambda owner: owner.nbytes)
        share = f"{fullest.nbytes / (shard_map.mean or 1):.2f} times the average"
        lead = (
            f"{name}: which of {owners} {shard_map.by}s holds which part of each tensor. Tensors that are alike share "
            f"a row. The most is held by {fullest.name}, {share}."
        )
    return {
        "lead": lead,
        "picture": [draw_shards(shard_map, is_narrow=narrow) for narrow in _WIDTHS],
        "by": shard_map.by,
        "rows": [
            (owner.name, f"{owner.nbytes:,}", format_bytes(owner.nbytes)) for owner in shard_map.owners[:_MOST_FOLDED]
        ],
        "total": f"Of {count(sum(row.repeats for row in shard_map.rows), 'tensor')}, {format_bytes(total)} in all.",
        "largest": [(row, f"{row.nbytes / most:.1%}", f"{row.nbytes / total:.1%}") for row in largest],
    }


def norms_chapter(counts: Mapping[str, Count]) -> Chapter | None:
    """Return a picture of the norms by layer, and tables of the norms by kind of tensor."""
    if not counts:
        return None
    kinds = dict(sorted(norms_by_layer(counts).items(), key=lambda kind: -len(kind[1]))[:_MOST_KINDS])
    single = [name for name in counts if not any(map(is_numeric_component, name.split(".")[:-1]))][:_LARGEST]
    not_finite = [name for name, counted in counts.items() if counted.nan or counted.inf]
    title = "Norm of the tensors of each layer"
    lead = "The 2-norm of the weights, over all numbers of a tensor."
    if not_finite:
        found = count(len(not_finite), "tensor")
        lead += f" NaN or infinity in {found}, such as {not_finite[0]}: not counted in their norms."
    kind_rows = []  # the range of the norms of a kind, and the layers with the minimum and maximum
    for name, by_layer in kinds.items():
        ends = [choose(by_layer, key=by_layer.__getitem__) for choose in (min, max)]
        norms = (f"{format_brief(by_layer[layer])} (layer {layer})" for layer in ends)
        kind_rows.append([name, str(len(by_layer)), *norms])
    single_rows = []  # norm, mean, standard deviation, minimum and maximum of a tensor
    for name in single:
        moments, extremes = counts[name].moments, (counts[name].low, counts[name].high)
        numbers = map(format_brief, (moments.norm, moments.mean, moments.deviation))
        single_rows.append(
            [name, *numbers, *("" if value is None else format_brief(float(value)) for value in extremes)]
        )
    return {
        "lead": lead,
        "picture": [draw_layers(title, kinds, is_narrow=narrow) for narrow in _WIDTHS] if kinds else None,
        "single": single_rows,
        "kinds": kind_rows,
    }
