"""Write a report on a run as one HTML file that opens from disk."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Source, path_of_source
from ckptkit.checks.inspect import Inspected, inspect
from ckptkit.checks.stats import count_values_by_tensor
from ckptkit.errors import Corrupt, NotACheckpoint, Usage, translate_os_errors
from ckptkit.formats import locate_all_chunks
from ckptkit.io.file import file_size, opening, read_at, read_small
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import is_remote, to_local_path
from ckptkit.io.progress import Progress, make_progress_reporter
from ckptkit.io.staging import publish_file
from ckptkit.markup import escaped_text
from ckptkit.models.names.weights import find_weights_or_none
from ckptkit.plugins.report import chapters
from ckptkit.plugins.report.history import METRICS, History, read_history
from ckptkit.plugins.report.shards import map_shards
from ckptkit.runs.ls import Listing, ls
from ckptkit.summary import Summarized
from ckptkit.version import __version__
from ckptkit.words import command_line, count, format_brief, format_bytes

GENERATOR = "ckptkit report"  # marks a page as written by ckptkit


def fill_page(content: Mapping[str, Any]) -> str:
    """Return the HTML page that the template `report.html` makes of these values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ckptkit", "."),
        autoescape=True,
        # as the page shows a value: markup unchanged, None as nothing, other values escaped
        finalize=lambda value: (
            value if hasattr(value, "__html__") else "" if value is None else escaped_text(str(value))
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "brief": lambda number: "" if number is None else format_brief(number),
        "bytes": format_bytes,
        "grouped": lambda number: "" if number is None else f"{number:,}",
        "spaced": lambda name: name.replace("_", " "),
    }
    return environment.get_template("plugins/report/report.html").render(content, generator=GENERATOR)


NAME = "report.html"
_SETTINGS = "train.toml"
_SETTINGS_LIMIT = 1 << 20  # bytes
_HEAD = 2048  # bytes at the start of a page that contain the generator mark


@dataclass(frozen=True, slots=True)
class Reported(Summarized):
    """The written page, its size in bytes, and the checkpoint that it describes, if there is one."""

    path: Path
    nbytes: int
    checkpoint: Path | None

    def summary(self) -> Iterator[str]:
        yield f"{self.path}: {format_bytes(self.nbytes)}"


def report(
    run: Source,
    out: str | Path | None = None,
    *,
    fast: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Reported:
    """Write a report on the run at `run` to the file `out`, by default `report.html` in the run.

    Reads the weights of the latest checkpoint with `jobs` threads, unless `fast`. Replaces an earlier report; raises
    `Occupied` for any other existing file, unless `overwrite`. Raises `NotACheckpoint` for a run without checkpoints
    and metrics.
    """
    root = path_of_source(run)
    listing = list_checkpoints(root)
    if out is None and (listing.root != root or is_remote(root)):
        problem = "the run is remote" if listing.root == root else "this is one checkpoint, not a run"
        raise Usage(problem, path=root, hint=f"run {command_line('report', root, 'OUT.html')}")
    dst = local_paths_of(root)[0] / NAME if out is None else to_local_path(out)
    complete = (one.path for one in reversed(listing.checkpoints) if one.is_complete)
    checkpoint = listing.latest or next(complete, None)  # a complete one without a step, if no run has steps
    latest = None if checkpoint is None else inspect(checkpoint)
    weights = None if latest is None or fast else latest.model
    if weights and (found := find_weights_or_none(weights)):
        weights = found.layout
    log = listing.root / METRICS
    total = (file_size(log) if log.is_file() else 0) + (weights.nbytes if weights else 0)
    report_bytes = make_progress_reporter(progress, total)
    history = read_history(listing.root, listing.checkpoints, report_bytes)
    settings = read_run_settings(listing.root / _SETTINGS)
    absolute = root.absolute()
    content = {
        "title": absolute.name or str(absolute),
        "lines": [str(absolute), summarize_settings(settings), describe_latest(latest) if latest else ""],
        "facts": page_facts(listing, history, latest, settings),
        "training": chapters.training_chapter(history),
        "checkpoints": chapters.checkpoints_chapter(listing, history.last_step),
        "shards": latest and chapters.shards_chapter(latest.whole.name, map_shards(latest.layout)),
        "norms": weights
        and chapters.norms_chapter(
            count_values_by_tensor(locate_all_chunks(weights), jobs=jobs, progress=report_bytes)
        ),
        "settings": settings,
        "foot": f"ckptkit {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    page = fill_page(content).encode()
    publish_file(dst, page, overwrite=overwrite or is_report(dst))
    return Reported(dst, len(page), checkpoint)


def list_checkpoints(root: Path) -> Listing:
    """Return the checkpoints of a run; an empty list if the run only has metrics."""
    try:
        return ls(root)
    except NotACheckpoint:
        if not (root / METRICS).is_file():
            raise
        return Listing(root, (), None, None)


def read_run_settings(path: Path) -> dict[str, object]:
    """Return the settings that a run was started with; {} without a file.

    Raises `Corrupt` for invalid TOML.
    """
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(read_small(path, _SETTINGS_LIMIT).decode())
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not a TOML file: {error}", path=path, hint="correct it, or move it away") from error


def is_report(path: Path) -> bool:
    with translate_os_errors(path):
        if path.is_symlink() or not path.is_file():
            return False
    with opening(path) as file:
        return f'content="{GENERATOR}"'.encode() in read_at(file, min(file.size, _HEAD), 0)


def describe_latest(latest: Inspected) -> str:
    ranks = latest.world_size
    written = f", written by {ranks} rank{'s' * (ranks > 1)}" if ranks else ""
    producer = f", by {latest.trainer}" if latest.trainer else ""
    return f"latest checkpoint: {latest.whole.name}, {latest.layout.format}{written}{producer}"


def summarize_settings(settings: Mapping[str, object]) -> str:
    templates = {
        "model": "model {}",
        "strategy": "{}",
        "batch_size": "{} sequences per step",
        "sequence_length": "{} tokens each",
        "lr": "learning rate {}",
        "weight_decay": "weight decay {}",
        "seed": "seed {}",
    }
    return ", ".join(form.format(settings[name]) for name, form in templates.items() if name in settings)


def page_facts(
    listing: Listing, history: History, latest: Inspected | None, settings: Mapping[str, object]
) -> Iterator[tuple[str, str, str]]:
    """Yield the facts at the top of the page: label, value, and a remark."""
    if history.last_step is not None:
        wanted = settings.get("steps")
        yield ("step", f"{history.last_step:,.0f}", f"of {wanted:,}" if isinstance(wanted, int) else "")
    for loss in history.drawable_series("loss"):
        yield ("loss", format_brief(loss.latest or 0.0), f"lowest {format_brief(loss.low)}")
    for tokens in history.drawable_series("tokens"):
        yield ("tokens", format_brief(tokens.latest or 0.0), "since the run began")
    for rate in history.drawable_series("tokens_per_second"):
        mean = sum(one.total for one in rate.stretches) / sum(one.count for one in rate.stretches)
        yield ("tokens per second", format_brief(mean), f"on average, {format_brief(rate.high)} at most")
    if latest is not None:
        tensors = f"{count(len(latest.layout.tensors), 'tensor')}, {format_bytes(latest.layout.nbytes)}"
        yield ("parameters", "unknown" if latest.parameters is None else format_brief(latest.parameters), tensors)
    if listing.checkpoints:
        complete = sum(one.is_complete for one in listing.checkpoints)
        more = f"latest: {listing.latest.name}" if listing.latest else ""
        yield ("checkpoints", f"{complete}", more)
