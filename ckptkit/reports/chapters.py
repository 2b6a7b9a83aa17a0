"""Chapters: the parts of a run's report, each made of what was found out before. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from ckptkit.ops.ls import Listed, Listing
from ckptkit.pictures.curves import draw_curves
from ckptkit.pictures.layers import Kind, draw_layers
from ckptkit.pictures.markup import Child, Markup, element
from ckptkit.pictures.numbers import brief, format_bytes
from ckptkit.pictures.page import Section, card, charts, code, fold_away, share, table
from ckptkit.pictures.series import Series
from ckptkit.pictures.shard_svg import draw_shards
from ckptkit.pictures.shards import ShardMap, is_number
from ckptkit.pictures.timeline import Stop, draw_timeline
from ckptkit.reports.history import History
from ckptkit.reports.norms import Norms

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
_MOST_LISTED = 12  # checkpoints that are not folded away
_MOST_FOLDED = 500
_LARGEST = 12
_MOST_KINDS = 14


def training(history: History) -> Iterator[Section]:
    """The curves, and some of their numbers as a table."""
    pictures = [
        draw_curves(title, drawn, may_be_log=title in _MAY_BE_LOG)
        for title, names in _CURVES
        if (drawn := history.drawn(*names))
    ]
    if not pictures:
        return
    drawn = [one for _, names in _CURVES for one in history.drawn(*names)]
    yield Section("training", "Training", lead_of(history, drawn), (charts(pictures), numbers_of(drawn)))


def lead_of(history: History, drawn: Sequence[Series]) -> str:
    """What the curves are of, and what was odd about their source."""
    said = [f"From {history.source}."]
    if any(stretch.count > 1 for one in drawn for stretch in one.stretches):
        said.append(
            "A line is the mean of steps that follow one another, the band reaches from the lowest to the highest."
        )
    if history.resumed:
        steps = ", ".join(f"{step:,.0f}" for step in history.resumed[-5:])
        said.append(f"Went back to step {steps}; what is shown are the steps as they were taken last.")
    if history.skipped:
        lines = "1 line was" if history.skipped == 1 else f"{history.skipped:,} lines were"
        said.append(f"{lines} no metrics of a step and left out.")
    return " ".join(said)


def numbers_of(drawn: Sequence[Series]) -> Markup:
    """The curves in numbers, at steps from the first to the last."""
    steps = sorted({stretch.first for one in drawn for stretch in one.stretches})
    every = max(1, -(-len(steps) // _SAMPLES))
    chosen = [*steps[:-1:every], steps[-1]]
    rows = [[f"{step:,.0f}", *(written(one.at(step)) for one in drawn)] for step in chosen]
    header = ["step", *(one.name.replace("_", " ") for one in drawn)]
    content = element("div", table(header, rows, range(len(header))), class_="wide")
    return fold_away("The same in numbers", content)


def written(value: float | None) -> str:
    """A number of a table; nothing where there is none."""
    return "" if value is None else brief(value)


def checkpoints(listing: Listing, last_step: float | None) -> Iterator[Section]:
    """The time line, and a table with the newest first."""
    if not listing.checkpoints:
        return
    complete = sum(one.is_complete for one in listing.checkpoints)
    total = format_bytes(sum(one.nbytes for one in listing.checkpoints))
    lead = f"{complete} complete of {len(listing.checkpoints)}, {total} on disk. {listing.tracker or ''}".strip()
    stops = [stop_of(one, one.step, listing) for one in listing.checkpoints if one.step is not None]
    metrics = list(dict.fromkeys(name for one in listing.checkpoints for name in one.metrics))[:4]
    newest = list(reversed(listing.checkpoints))
    body: list[Child] = [card(draw_timeline(stops, last_step), name="checkpoints by step")] if stops else []
    body.append(card(checkpoint_table(newest[:_MOST_LISTED], metrics, listing), name="the newest checkpoints"))
    older = newest[_MOST_LISTED:][:_MOST_FOLDED]
    if older:
        rest = element("div", checkpoint_table(older, metrics, listing), class_="wide")
        body.append(fold_away(f"{len(older)} older ones", rest))
    yield Section("checkpoints", "Checkpoints", lead, tuple(body))


def stop_of(one: Listed, step: int, listing: Listing) -> Stop:
    """A checkpoint as the time line shows it."""
    metrics = "".join(f", {name} {brief(value)}" for name, value in list(one.metrics.items())[:6])
    told = f", {date_of(one)}{metrics}{f', {one.problem}' if one.problem else ''}"
    is_latest = one.path == listing.latest
    return Stop(one.path.name, step, one.nbytes, one.is_complete, one.is_weights_only, one.is_pinned, is_latest, told)


def checkpoint_table(listed: Sequence[Listed], metrics: Sequence[str], listing: Listing) -> Markup:
    """Checkpoints, with the metrics of these names."""
    rows = [
        [
            code(one.path.name),
            "" if one.step is None else f"{one.step:,}",
            date_of(one),
            "" if one.world_size is None else str(one.world_size),
            format_bytes(one.nbytes),
            *(written(one.metrics.get(name)) for name in metrics),
            state_of(one, listing),
        ]
        for one in listed
    ]
    header = ["checkpoint", "step", "saved", "ranks", "size", *(name.replace("_", " ") for name in metrics), "state"]
    return table(header, rows, (1, 3, 4, *range(5, 5 + len(metrics))))


def state_of(one: Listed, listing: Listing) -> list[Child]:
    """Whether a checkpoint is complete, and what else is to be known of it."""
    state = element("span", "complete", class_="good") if one.is_complete else None
    fault = element("span", one.problem or "not complete", class_="bad") if one.problem or not one.is_complete else None
    facts = [
        ("latest", one.path == listing.latest),
        ("pinned", one.is_pinned),
        ("weights only", one.is_weights_only),
    ]
    words: list[Child] = [state, fault, *(word for word, holds in facts if holds)]
    there = [word for word in words if word is not None]
    return [there[0], *(child for word in there[1:] for child in (", ", word))]


def date_of(one: Listed) -> str:
    """When a checkpoint was saved."""
    return datetime.fromtimestamp(one.saved_at, UTC).strftime("%Y-%m-%d %H:%M")


def shards(name: str, found: ShardMap) -> Iterator[Section]:
    """Which rank or file holds which part of a checkpoint."""
    if found.rows:
        picture = card(draw_shards(found), name="shard map")
        held = [[owner.name, f"{owner.nbytes:,}", format_bytes(owner.nbytes)] for owner in found.owners[:_MOST_FOLDED]]
        rows = fold_away("The same in numbers", table((found.by, "bytes", ""), held, (1, 2)))
        yield Section("shards", "Shard map", describe_shards(name, found), (picture, rows))


def describe_shards(name: str, found: ShardMap) -> str:
    """What the shard map shows, in words."""
    count = len(found.owners)
    if count == 1:
        return f"{name}: one {found.by} holds everything."
    fullest = max(found.owners, key=lambda owner: owner.nbytes)
    return (
        f"{name}: which of {count} {found.by}s holds which part of each tensor. Tensors that are alike share a row. "
        f"The most is held by {fullest.name}, {fullest.nbytes / (found.mean or 1):.2f} times the average."
    )


def largest(found: ShardMap) -> Iterator[Section]:
    """The tensors with the most bytes; those that are alike share a row."""
    if not found.rows:
        return
    chosen = sorted(found.rows, key=lambda row: -row.spec.nbytes)[:_LARGEST]
    total, most = sum(row.nbytes for row in found.rows) or 1, max(row.nbytes for row in chosen) or 1
    rows = [
        [
            [code(row.label), f" x{row.repeats}" if row.repeats > 1 else None],
            row.spec.dtype.name,
            element("span", " x ".join(map(str, row.spec.shape)) or "one number", class_="line"),
            format_bytes(row.spec.nbytes),
            [format_bytes(row.nbytes), share(row.nbytes / most)],
            f"{100 * row.nbytes / total:.1f}%",
        ]
        for row in chosen
    ]
    what = card(table(("tensor", "dtype", "shape", "each", "all", "share"), rows, (3, 4, 5)), name="largest tensors")
    lead = f"Of {sum(row.repeats for row in found.rows):,} tensors, which take {format_bytes(total)} in all."
    yield Section("largest", "Largest tensors", lead, (what,))


def norms(found: Norms) -> Iterator[Section]:
    """The norms by layer as a picture, and of every kind of tensor as a table."""
    if not found.counts:
        return
    kinds = sorted(found.kinds, key=lambda kind: -len(kind.by_layer))[:_MOST_KINDS]
    title = "Norm of the tensors of each layer"
    body: list[Child] = [card(draw_layers(title, kinds), name="norms by layer")] if kinds else []
    in_layers = fold_away("Norms by layer in numbers", element("div", layer_table(kinds), class_="wide"))
    single = [name for name in found.counts if not any(map(is_number, name.split(".")[:-1]))]
    if single:
        body.append(card(norm_table(found, single[:_LARGEST]), name="norms of other tensors"))
    lead = "The 2-norm of the weights, over all numbers of a tensor."
    unsound = found.unsound
    if unsound:
        lead += f" NaN or infinity in {len(unsound)} tensors, such as {unsound[0]}: not counted in their norms."
    yield Section("norms", "Norms by layer", lead, (*body, in_layers if kinds else None))


def layer_table(kinds: Sequence[Kind]) -> Markup:
    """The range of each kind, and in which layers its ends are."""
    rows = []
    for kind in kinds:
        low, high = (choose(kind.by_layer, key=kind.by_layer.__getitem__) for choose in (min, max))
        lowest, highest = (f"{brief(kind.by_layer[layer])} (layer {layer})" for layer in (low, high))
        rows.append([code(kind.name), str(len(kind.by_layer)), lowest, highest])
    return table(("tensor", "layers", "lowest norm", "highest norm"), rows, (1, 2, 3))


def norm_table(found: Norms, names: Sequence[str]) -> Markup:
    """Norm, mean, deviation and extremes of some tensors."""
    rows = []
    for name in names:
        count = found.counts[name]
        moments = (count.moments.norm, count.moments.mean, count.moments.deviation)
        extremes = ("" if value is None else brief(float(value)) for value in (count.low, count.high))
        rows.append([code(name), *map(brief, moments), *extremes])
    return table(("not in a layer", "norm", "mean", "deviation", "lowest", "highest"), rows, range(1, 6))


def settings(values: Mapping[str, object]) -> Iterator[Section]:
    """What the run was started with."""
    if values:
        rows = [[code(name), str(value)] for name, value in values.items()]
        yield Section("settings", "Settings", "", (fold_away("From train.toml", table(("setting", "value"), rows)),))
