"""Run `ckptkit diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from ckptkit.io.path import to_path
from ckptkit.settings import Setting
from ckptkit.words import command_line

if TYPE_CHECKING:
    from ckptkit.checks.differences import Diff, Difference, Kind

_ROWS = 20  # rows of a table without --all


_OPTIONS = {
    "rtol": Setting(float, None, "Relative tolerance: a fraction of the number in B.", "X", 0),
    "atol": Setting(float, None, "Absolute tolerance. With a tolerance, NaN equals NaN.", "X", 0),
    "allow_cast": Setting(bool, False, "Allow float dtypes to differ: round the wider one first."),
    **shared_options("include", "exclude", "allow_unmatched", "map"),
    "rename": Setting(tuple[str, ...], (), "Rename the parameters of A first; repeatable.", "'REGEX=>TEXT'"),
    "base": Setting(str, None, "Model (directory or Hub id) with the config.json to translate names with.", "MODEL"),
    **shared_options("optimizer_order", "jobs"),
}


@with_options(_OPTIONS, insert_before="every")
def diff(
    a: Annotated[Path, checkpoint_argument("A")],
    b: Annotated[Path, typer.Argument(parser=to_path, metavar="B", help="The checkpoint or run to compare with.")],
    every: Annotated[bool, typer.Option("--all", help="List every tensor on its own line.")] = False,
    also: Also = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Show how two checkpoints differ.

    ckptkit compares names, shapes, dtypes and values, bit for bit. Formats and world sizes may differ.

    With --rtol or --atol, two numbers are equal if |a - b| <= atol + rtol * |b|.

    Example: ckptkit diff run/ckpt-500 run-on-8/ckpt-500 --rtol 1e-5

    Exit codes: 0 the same; 1 not the same; 2 usage; 3 one is not a checkpoint, or is damaged; 4 an I/O failure.
    """
    from ckptkit.checks.diff import diff as compare

    a = join_also_directories(a, also)
    with progress_bar("diff") as progress:
        result = compare(a, b, **given_settings(options), progress=progress)
    if json:
        print_json(to_json(result))
    else:
        for asked, taken in ((a, result.a), (b, result.b)):
            print_used_checkpoint(asked, taken)
        report(result, every=every)
    if not result.is_equal:
        raise typer.Exit(1)


def to_json(result: Diff) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    names = ("a", "b", "only_in_a", "only_in_b", "renamed", "tensors", "nbytes", "checked_bytes", "notes")
    different = [difference_json(difference) for difference in result.different]
    configs = [pick(config, "key", "here", "there") for config in result.configs]
    return {"equal": result.is_equal, "different": different, "configs": configs, **pick(result, *names)}


def difference_json(difference: Difference) -> dict[str, Any]:
    """Return a difference as JSON; `max_abs` and `first` are null if the values were not compared."""
    sides = {side: str(spec) if spec else None for side, spec in (("a", difference.a), ("b", difference.b))}
    if difference.values:
        sides = {side: repr(value) for side, value in zip("ab", difference.values, strict=True)}
    result = {"name": difference.name, "reason": difference.reason, **sides}
    if difference.distance is None:
        return result | {"max_abs": None, "first": None}
    return result | {
        "elements": difference.distance.different,
        **pick(difference.distance, "max_abs", "first", "rel_l2", "strange"),
    }


def report(result: Diff, *, every: bool) -> None:
    """Print the result for a reader: the most important differences first, the conclusion last."""
    from ckptkit.checks.differences import Kind, conclusion_line

    for text in result.notes:
        print_note(f"note: {text}")
    most = None if every else _ROWS
    kinds = [Kind(difference, 1) for difference in result.different] if every else result.by_kind
    print_differences_without_size("another shape", [kind for kind in kinds if kind.difference.reason == "shape"], most)
    print_differences_with_size([kind for kind in kinds if kind.difference.distance], most)
    others = [kind for kind in kinds if not kind.difference.distance and kind.difference.reason != "shape"]
    print_differences_without_size("entries with another value or dtype", others, most)
    for side, path, names in (("A", result.a, result.only_in_a), ("B", result.b, result.only_in_b)):
        print_lines(f"only in {side}, {path}", names if every else fold_layer_names(names), most)
    renames = [f"{old} => {new}" for old, new in result.renamed.items()]
    if renames and not every:
        from ckptkit.layout.renames import explain_renames

        rules = explain_renames(result.renamed)
        renames = [with_repeat_count(f"{rule.old} => {rule.new}", rule.count) for rule in rules]
    print_lines("renamed", renames, most)
    print_text_line(conclusion_line(result))
    changed = [difference for difference in result.different if difference.reason == "dtype"]
    if any(one.a and one.b and one.a.dtype.is_castable_to(one.b.dtype) for one in changed):
        print_note("hint: --allow-cast compares floats of two dtypes after conversion")
    elif any(difference.reason == "values" and difference.is_weight for difference in result.different):
        print_note(f"hint: {command_line('stats', result.a, result.b)} shows which parameters moved most")


def print_differences_with_size(kinds: Sequence[Kind], max_rows: int | None) -> None:
    """Print a table of differences with their sizes. A change of dtype common to all stands in the header."""
    if not kinds:
        return
    changes = {describe_change(kind.difference) if kind.difference.reason == "dtype" else "" for kind in kinds}
    common = changes.pop() if len(changes) == 1 else ""
    rows = []
    for kind in kinds[:max_rows]:
        difference, distance = kind.difference, kind.difference.distance
        assert distance is not None
        assert difference.a is not None
        strange = f", {distance.strange:,} NaN/Inf" if distance.strange else ""
        first = "" if distance.first is None else f"[{','.join(map(str, distance.first))}]"
        differ, total = distance.different, kind.count * difference.a.numel
        share = f"{differ:,}" if differ < 1000 else f"{min(100 * differ / total, 99.9):.3g}%"
        change = f": {describe_change(difference)}" if not common and difference.reason == "dtype" else ""
        name = with_repeat_count(f"{difference.name}{change}", kind.count)
        sizes = f"{distance.rel_l2:.3g}", f"{distance.max_abs:.3g}"
        rows.append((*sizes, f"{'all' if differ == total else share}{strange}", first, name))
    print_table(rows, ("rel L2", "max", "differ", "first", f"tensor: {common}" if common else "tensor"))
    print_omitted_count(len(kinds), max_rows)


def print_differences_without_size(heading: str, kinds: Sequence[Kind], max_rows: int | None) -> None:
    """Print differences without a size, such as other shapes."""
    lines = [
        with_repeat_count(f"{kind.difference.name}: {describe_change(kind.difference)}", kind.count) for kind in kinds
    ]
    print_lines(heading, lines, max_rows)


def describe_change(difference: Difference) -> str:
    """Return how a value, dtype or shape differs in B: `old => new`."""
    if difference.values:
        return f"{difference.values[0]!r:.40} => {difference.values[1]!r:.40}"
    if difference.a is None or difference.b is None:
        return "not the same"
    if difference.reason == "dtype":
        return f"{difference.a.dtype} => {difference.b.dtype}"
    return " => ".join(str(list(spec.shape)).replace(" ", "") for spec in (difference.a, difference.b))


def fold_layer_names(names: Sequence[str]) -> list[str]:
    """Return names, with one line for all names that differ only in the layer number."""
    from ckptkit.layout.renames import numbers_to_wildcards

    counts = Counter(map(numbers_to_wildcards, names))
    lines = (
        with_repeat_count(numbers_to_wildcards(name), counts[numbers_to_wildcards(name)])
        if counts[numbers_to_wildcards(name)] > 1
        else name
        for name in names
    )
    return list(dict.fromkeys(lines))


def print_lines(heading: str, lines: Sequence[str], max_rows: int | None) -> None:
    """Print a heading and lines, if there are any: the first `max_rows`, and the number of the others."""
    if lines:
        print_text_line(f"{heading}:")
    for line in lines[:max_rows]:
        print_text_line(f"  {line}")
    print_omitted_count(len(lines), max_rows)


def print_omitted_count(number: int, max_rows: int | None) -> None:
    if max_rows is not None and number > max_rows:
        print_text_line(f"  ... {number - max_rows:,} more: --all lists them")
