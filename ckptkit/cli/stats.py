"""Run `ckptkit stats`: statistics of the tensors in a checkpoint, or which tensors changed most between two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.conversion import AllowUnmatched, Exclude, Include, Jobs
from ckptkit.cli.output import Json, Quiet, note_used, pick, print_json, print_table, progress_bar, say
from ckptkit.cli.sources import Also, with_others
from ckptkit.errors import Usage
from ckptkit.io.path import to_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptkit.checks.stats import Stats, TensorStats
    from ckptkit.layout.counting import Count

Row = tuple[str, "Count"]  # label of a table row, and its statistics


def stats(
    path: Annotated[
        Path,
        typer.Argument(parser=to_path, metavar="PATH", help="A checkpoint, or a run (its latest complete checkpoint)."),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(parser=to_path, metavar="OTHER", help="A later checkpoint: show which tensors moved most."),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor on its own line.")] = False,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="With OTHER: show the N tensors that moved most.")] = 20,
    include: Include = None,
    exclude: Exclude = None,
    allow_unmatched: AllowUnmatched = False,
    jobs: Jobs = None,
    also: Also = None,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Show norm, mean, deviation and extremes of tensors.

    Also counts zeros, NaN and Inf. Similar modules share a line.

    Example: ckptkit stats run/ckpt-500 --include 'model.*'

    Mean, deviation and norm count only finite numbers, summed in float64. The sums for modules and for all tensors
    leave out counters, such as the steps of an optimizer.

    Exit codes: 0 done; 2 usage; 3 not a checkpoint, damaged or not supported; 4 an I/O failure; 5 an unsafe path.
    """
    path = with_others(path, also)
    if other is not None:
        if include or exclude or tensors:
            raise Usage("--include, --exclude and --tensors cannot be combined with OTHER", hint="drop them or OTHER")
        from ckptkit.cli.movement import report_movement

        report_movement(path, other, top=top, jobs=jobs, json=json)
        return
    from ckptkit.checks.stats import stats as look

    with progress_bar("statistics") as progress:
        result = look(
            path,
            include=include or (),
            exclude=exclude or (),
            allow_unmatched=allow_unmatched,
            jobs=jobs,
            progress=progress,
        )
    if json:
        print_json(to_json(result))
    else:
        report(path, result, each=tensors)


def to_json(result: Stats) -> dict[str, Any]:
    tensors = [tensor_json(tensor) for tensor in result.tensors]
    return {**pick(result, "path", "format"), "total": count_json(result.total), "tensors": tensors}


def tensor_json(tensor: TensorStats) -> dict[str, Any]:
    what = {"name": tensor.name, "dtype": tensor.spec.dtype.name, "shape": list(tensor.spec.shape)}
    return what | count_json(tensor) | {"in_total": tensor.in_total}


def count_json(counted: Count) -> dict[str, Any]:
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
    note_used(path, result.path)
    total = result.total
    rows: list[Row] = [(tensor.name, tensor) for tensor in result.tensors]
    if not each:
        rows = [(f"{'  ' * branch.depth}{branch.label}", counted) for branch, counted in result.by_module()]
    for line in result.summary():
        say(line)
    columns = [column for column in COLUMNS if column.is_shown(rows)]
    print_table(
        [(*(column.write(counted) for column in columns), name) for name, counted in [*rows, ("all", total)]],
        (*(column.name for column in columns), "tensor" if each else "module or tensor"),
    )


class Column:
    """A column of the table. Without `always` it is hidden if it is empty in every row."""

    def __init__(self, name: str, write: Callable[[Count], str], *, always: bool = True) -> None:
        self.name = name
        self.write = write
        self._always = always

    def is_shown(self, rows: Sequence[Row]) -> bool:
        """Return True if the column is part of a table with these rows."""
        return self._always or any(self.write(counted) for _, counted in rows)


def brief(value: float | None) -> str:
    """Return a number with three digits: `0.0123`, `-1.23e-5`; "" for None."""
    if value is None:
        return ""
    digits, e, power = f"{value:.3g}".partition("e")
    return f"{digits}e{int(power)}" if e else digits


def percent_of(part: int, whole: int) -> str:
    """Return a fraction as a percentage, such as `3.1%`; "" for 0."""
    return f"{100 * part / whole:.2g}%" if part else ""


COLUMNS = (
    Column("norm", lambda counted: brief(counted.moments.norm if counted.moments.finite else None)),
    Column("mean", lambda counted: brief(counted.moments.mean if counted.moments.finite else None)),
    Column("std", lambda counted: brief(counted.moments.deviation if counted.moments.finite else None)),
    Column("low", lambda counted: brief(counted.low)),
    Column("high", lambda counted: brief(counted.high)),
    Column("zero", lambda counted: percent_of(counted.zero, counted.numbers), always=False),
    Column("NaN", lambda counted: f"{counted.nan:,}" if counted.nan else "", always=False),
    Column("Inf", lambda counted: f"{counted.inf:,}" if counted.inf else "", always=False),
    Column("denormal", lambda counted: f"{counted.denormal:,}" if counted.denormal else "", always=False),
)
