"""Averages: the weighted mean of several checkpoints' models, as one model.

choose -> open -> align -> fit -> stage -> plan for each -> fill -> settle for each -> seal -> manifest -> commit
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum, isclose, isfinite
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, path_of, step_of
from ckptkit.checkpoints.companions import Companions, find_companions
from ckptkit.checkpoints.fit import abridge
from ckptkit.checkpoints.part import Part
from ckptkit.checkpoints.run import Run
from ckptkit.engine.copy import Copied, copy
from ckptkit.engine.mean import Mean
from ckptkit.engine.sources import place_of
from ckptkit.errors import Mismatch, Usage
from ckptkit.files.allocation import free_bytes
from ckptkit.files.origin import Origin
from ckptkit.files.path import to_local
from ckptkit.files.staging import check_destination
from ckptkit.formats import get_writer, locate
from ckptkit.layout import Chunk, Layout, Options, Place
from ckptkit.ops.consolidate import DEFAULT_SHARD_SIZE, companion_files
from ckptkit.ops.conversion.drafts import Drafts, make_draft
from ckptkit.ops.conversion.models import Model, align, arrange, cast_to, open_model
from ckptkit.ops.conversion.output import Output
from ckptkit.ops.conversion.pipeline import check_apart, create, finish, opened, peak_rss_bytes
from ckptkit.ops.conversion.result import Converted
from ckptkit.ops.selection import Edits
from ckptkit.plan import Plan, make_plan
from ckptkit.progress import Progress, telling
from ckptkit.tensors.box import Box

_SLACK = 1e-6  # by which given weights may miss 1 before that is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged(Converted):
    """What was made of which checkpoints, and their weights, which add up to 1. The `source` is the first of them."""

    sources: tuple[Path, ...]
    weights: tuple[float, ...]


def average(
    sources: Source | Sequence[Source],
    dst: str | Path,
    *,
    weights: Sequence[float] = (),
    last: int | None = None,
    to: str = "hf",
    dtype: str | Sequence[str] = (),
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
) -> Averaged:
    """Write the weighted mean of the models in several checkpoints to directory `dst`, in the format `to`.

    With `last` the sources are that many complete checkpoints, the latest, of the one run given. Sources may be of any
    formats, world sizes and dtypes, but must have the same names and shapes. The result has the names and dtypes of the
    first, unless `dtype` says otherwise; "hf" has the model's own names, and config and tokenizer beside the weights.
    The `weights`, positive, are divided by their sum; without any all are equal. Floats are added up in float64 in the
    order of the sources and rounded at the end; integers and booleans are those of the last source. There is no
    optimizer: a mean of its moments is nothing to go on from. `include` and `exclude` are globs of names as each
    checkpoint has them. Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit or a checksum
    differs.
    """
    began = time.perf_counter()
    writer = get_writer(to)
    dst = to_local(dst)
    output = Output(dst, overwrite, sync, jobs, progress, is_file=dst.suffix in writer.suffixes)
    check_destination(dst, overwrite, is_file=output.is_file)
    parts = choose_sources(sources, last)
    paths = [part.path for part in parts]
    shares, notes = settle_weights(weights, len(paths))
    origins = [Origin.of(path) for path in paths]
    for path in paths:
        check_apart(path, dst)
    asked = Edits(include, exclude, (), [dtype] if isinstance(dtype, str) else dtype)
    models = align([open_model(part, asked) for part in parts])
    companions = find_companions(paths[0], None) if to == "hf" else Companions()
    layouts, remarks = arrange(models, companions, to)
    first, casts = asked.cast(layouts[0], lambda _: True)
    others = [locate(cast_to(layout, first.specs)) for layout in layouts[1:]]
    world_size = models[0].whole.world_size or 1
    draft = make_draft(first, writer, Options(max_shard_size, world_size))
    drafts = Drafts(origins[0], [draft], companion_files(companions, first), made_of=describe(models, shares))
    report = Averaged(
        source=paths[0],
        sources=tuple(paths),
        weights=shares,
        output=dst,
        format=to,
        wrapper=models[0].wrapper if to == "hf" else "",
        files={dst.name: sum(drafts.file_sizes.values())} if output.is_file else drafts.file_sizes,
        tensors=len(first.tensors),
        nbytes=first.nbytes,
        renamed={},
        dropped=models[0].left_out,
        cast=casts,
        notes=[*notes, *remarks],
        world_size=world_size if writer.is_sharded else None,
        dry_run=dry_run,
    )
    if dry_run:
        copies = sum(len(tensor.chunks) for layout in (first, *others) for tensor in layout.tensors.values())
        return replace(report, copies=copies, free_bytes=free_bytes(dst), seconds=time.perf_counter() - began)
    copied, taken = write(drafts, others, shares, origins, output)
    return replace(
        report,
        notes=[*report.notes, *taken_note(taken, paths[-1])],
        seconds=time.perf_counter() - began,
        checked_bytes=copied.checked_bytes,
        unchecked_bytes=copied.unchecked_bytes,
        peak_rss_bytes=peak_rss_bytes(),
    )


def choose_sources(sources: Source | Sequence[Source], last: int | None) -> list[Part]:
    """The checkpoints to be averaged: those given, or the last ones of the run given, oldest first."""
    given = list(sources) if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
    if last is None:
        if len(given) < 2:
            hint = "name another, or take the last of a run with --last"
            raise Usage("at least two checkpoints make a mean", path=path_of(given[0]) if given else None, hint=hint)
        return [Checkpoint.open(source).model_part for source in given]
    if len(given) != 1:
        raise Usage(f"--last chooses from one run, {len(given)} paths are given")
    run = path_of(given[0])
    complete = Run(run).checkpoints()
    if not 0 < last <= len(complete):
        hint = "`ckptkit ls` shows the checkpoints of a run"
        raise Usage(f"the run has {len(complete)} complete checkpoints, not {last}", path=run, hint=hint)
    return [checkpoint.model_part for checkpoint in complete[-last:]]


def settle_weights(weights: Sequence[float], count: int) -> tuple[tuple[float, ...], list[str]]:
    """Weights that add up to 1, and what there is to say of those that were given and do not."""
    if not weights:
        return (1 / count,) * count, []
    if len(weights) != count:
        raise Usage(f"{len(weights)} weights for {count} checkpoints", hint="give one for each, like --weights 2,1,1")
    if not all(isfinite(weight) and weight > 0 for weight in weights):
        raise Usage(f"weights must be positive: {', '.join(map(str, weights))}")
    total = fsum(weights)
    shares = tuple(weight / total for weight in weights)
    if isclose(total, 1, abs_tol=_SLACK):
        return shares, []
    return shares, [f"the weights add up to {total:g}, and were divided by that"]


def describe(models: Sequence[Model], shares: Sequence[float]) -> dict[str, str]:
    """What the manifest says of where the mean comes from: of all but the first no path, so that none is pushed."""
    terms = [f"{share:.6g} x {name_of(model.whole.root)}" for model, share in zip(models, shares, strict=True)]
    return {
        "path": str(models[0].whole.root.absolute()),
        "format": models[0].whole.format,
        "mean": " + ".join(terms),
    }


def name_of(root: Path) -> str:
    """What a checkpoint is called: by its step, also where the model is a part of it."""
    return root.parent.name if step_of(root.parent) is not None else root.absolute().name


def write(
    drafts: Drafts, others: Sequence[Layout], shares: Sequence[float], origins: Sequence[Origin], output: Output
) -> tuple[Copied, frozenset[str]]:
    """Make the files and fill them. The destination appears whole or not at all.

    Returns what was checked of all sources, and the names of tensors that were taken from the last.
    """
    with opened(drafts, output, key=None) as stage:
        (first,) = create(drafts, stage.path)
        plan = make_plan(first.src, first.dst, others, Mean(shares))
        check_ties(plan)
        ledger = copy(plan, jobs=output.jobs, progress=telling(output.progress, plan.nbytes))
        for origin in origins[1:]:
            origin.check()
        return finish(drafts, [plan], [ledger], stage, output), frozenset(ledger.noted)


def check_ties(plan: Plan) -> None:
    """Raise `Mismatch` if tensors that share their bytes in the destination do not in one of the sources."""
    made_of: dict[tuple[int, Place], list[tuple[Box, Chunk]]] = {}
    for target in plan.targets:
        for number, source in enumerate(plan.sources):
            found = [(copy.region, copy.src) for copy in target.copies if copy.source == number]
            if made_of.setdefault((number, place_of(target.chunk)), found) != found:
                message = f"it is tied to another tensor in {plan.src.root}, but not here"
                hint = "`--to hf` writes each by itself"
                raise Mismatch(message, path=source.root, tensor=target.name, hint=hint)


def taken_note(taken: frozenset[str], last: Path) -> list[str]:
    """What there is to say of tensors that were not averaged."""
    return [f"integers and booleans that differ are those of {last}: {abridge(sorted(taken))}"] if taken else []
