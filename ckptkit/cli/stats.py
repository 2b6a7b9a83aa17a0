"""Run `ckptkit stats`: statistics of the tensors in a checkpoint, or which tensors changed most between two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ckptkit.cli.conversion import shared_options
from ckptkit.cli.options import Also, checkpoint_argument, given_settings, join_also_directories, with_options
from ckptkit.cli.output import (
    Json,
    pick,
    print_json,
    print_note,
    print_table,
    print_text_line,
    print_used_checkpoint,
    progress_bar,
    with_repeat_count,
)
from ckptkit.errors import Usage
from ckptkit.io.path import to_path
from ckptkit.words import count, per_cent

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptkit.checks.parameter_changes import Movement
    from ckptkit.checks.stats import Stats
    from ckptkit.engine.counting import Count


@with_options(shared_options("include", "exclude", "allow_unmatched", "jobs"))
def stats(
    path: Annotated[Path, checkpoint_argument("PATH")],
    other: Annotated[
        Path | None,
        typer.Argument(parser=to_path, metavar="OTHER", help="A later checkpoint: show which tensors moved most."),
    ] = None,
    tensors: Annotated[bool, typer.Option(help="List every tensor on its own line.")] = False,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="With OTHER: show the N tensors that moved most.")] = 20,
    also: Also = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Show norm, mean, deviation and extremes of tensors.

    Also counts zeros, NaN and Inf. Similar modules share a line.

    Example: ckptkit stats run/ckpt-500 --include 'model.*'

    Mean, deviation and norm count only finite numbers, summed in float64. The sums for modules and for all tensors
    leave out counters, such as the steps of an optimizer.

    Exit codes: 0 done; 2 usage; 3 not a checkpoint, damaged or not supported; 4 an I/O failure; 5 an unsafe path.
    """
    path = join_also_directories(path, also)
    chosen = given_settings(options)
    if other is not None:
        if tensors or chosen.keys() & {"include", "exclude"}:
            raise Usage("--include, --exclude and --tensors cannot be combined with OTHER", hint="drop them or OTHER")
        report_movement(path, other, top=top, jobs=options["jobs"], json=json)
        return
    from ckptkit.checks.stats import stats as look

    with progress_bar("statistics") as progress:
        result = look(path, **chosen, progress=progress)
    if json:
        counted = [
            {"name": tensor.name, "dtype": tensor.spec.dtype.name, "shape": tensor.spec.shape}
            | statistics_json(tensor)
            | {"in_total": tensor.in_total}
            for tensor in result.tensors
        ]
        print_json({**pick(result, "path", "format"), "total": statistics_json(result.total), "tensors": counted})
    else:
        report(path, result, each=tensors)


def statistics_json(counted: Count) -> dict[str, Any]:
    """Return statistics as JSON; mean and deviation are null without finite numbers."""
    moments = counted.moments
    return {
        "norm": moments.norm,
        "mean": moments.mean if moments.finite else None,
        "std": moments.deviation if moments.finite else None,
        **pick(counted, "numbers", "low", "high", "nan", "inf", "denormal", "zero", "sparsity"),
    }


def report(path: Path, result: Stats, *, each: bool) -> None:
    """Print the result for a reader: a line for each module or tensor, and a line for all."""
    print_used_checkpoint(path, result.path)
    total = result.total
    rows: list[tuple[str, Count]] = [(tensor.name, tensor) for tensor in result.tensors]
    if not each:
        rows = [(f"{'  ' * branch.depth}{branch.label}", counted) for branch, counted in result.by_module()]
    for line in result.summary():
        print_text_line(line)
    columns = [one for one in COLUMNS if one.is_always_shown or any(one.write(counted) for _, counted in rows)]
    print_table(
        [(*(column.write(counted) for column in columns), name) for name, counted in [*rows, ("all", total)]],
        (*(column.name for column in columns), "tensor" if each else "module or tensor"),
    )


class Column(NamedTuple):
    """A column of the table. Unless it is always shown, it is hidden if it is empty in every row."""

    name: str
    write: Callable[[Count], str]
    is_always_shown: bool = True


def format_three_digits(value: float | None) -> str:
    """Return a number with three digits: `0.0123`, `-1.23e-5`; "" for None."""
    if value is None:
        return ""
    digits, e, power = f"{value:.3g}".partition("e")
    return f"{digits}e{int(power)}" if e else digits


COLUMNS = (
    Column("norm", lambda counted: format_three_digits(counted.moments.norm if counted.moments.finite else None)),
    Column("mean", lambda counted: format_three_digits(counted.moments.mean if counted.moments.finite else None)),
    Column("std", lambda counted: format_three_digits(counted.moments.deviation if counted.moments.finite else None)),
    Column("low", lambda counted: format_three_digits(counted.low)),
    Column("high", lambda counted: format_three_digits(counted.high)),
    Column("zero", lambda counted: f"{100 * counted.zero / counted.numbers:.2g}%" if counted.zero else "", False),
    Column("NaN", lambda counted: f"{counted.nan:,}" if counted.nan else "", False),
    Column("Inf", lambda counted: f"{counted.inf:,}" if counted.inf else "", False),
    Column("denormal", lambda counted: f"{counted.denormal:,}" if counted.denormal else "", False),
)


def report_movement(a: Path, b: Path, *, top: int, jobs: int | None, json: bool) -> None:
    """Print the `top` kinds of parameters that changed most from checkpoint `a` to `b`; as JSON, every parameter."""
    from ckptkit.checks.stats import stats as measure

    with progress_bar("compare") as progress:
        result = measure(a, b, jobs=jobs, progress=progress)
    if json:
        moved = [
            pick(movement, "name", "change", "equal") | pick(movement.distance, "max_abs", "cosine", "strange")
            for movement in result.tensors
        ]
        print_json({"moved": moved, "equal": result.whole.equal, **pick(result, "a", "b", "notes")})
        return
    print_note(f"from {result.a} to {result.b}")
    for text in result.notes:
        print_note(f"note: {text}")
    kinds = result.by_kind
    rows = []
    for movement in kinds[:top]:
        distance = movement.distance
        strange = f", {distance.strange:,} NaN/Inf" if distance.strange else ""
        layers = ".".join(word for word in movement.peak.split(".") if word.isdecimal()) if movement.tensors > 1 else ""
        sizes = f"{movement.change:.3g}", f"{distance.max_abs:.3g}{strange}", format_cosine(movement)
        name = with_repeat_count(movement.name, movement.tensors)
        rows.append((*sizes, per_cent(movement.equal), layers, name))
    print_table(rows, ("change", "max", "cosine", "equal", "most", "parameter"))
    if len(kinds) > top:
        print_text_line(f"... {len(kinds) - top:,} more that changed less: --top {len(kinds)} lists them")
    total = result.whole
    angle = f", cosine {format_cosine(total)}" if format_cosine(total) else ""
    print_text_line(
        f"all of {count(total.tensors, 'tensor')} together: change {total.change:.3g}{angle}, "
        f"{per_cent(total.equal)} equal"
    )


def format_cosine(movement: Movement) -> str:
    value = movement.distance.cosine
    return "" if value is None else f"{value:.4f}"
