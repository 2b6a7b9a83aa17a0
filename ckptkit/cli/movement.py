"""Print which parameters changed most between two checkpoints, for `ckptkit stats A B`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.cli.diff import with_count
from ckptkit.cli.output import note, pick, print_json, print_table, progress_bar, say
from ckptkit.words import count, per_cent

if TYPE_CHECKING:
    from ckptkit.checks.moved import Moved, Movement


def report_movement(a: Path, b: Path, *, top: int, jobs: int | None, json: bool) -> None:
    """Print the `top` kinds of parameters that changed most from checkpoint `a` to `b`; as JSON, every parameter."""
    from ckptkit.checks.stats import stats

    with progress_bar("compare") as progress:
        result = stats(a, b, jobs=jobs, progress=progress)
    if json:
        print_json(to_json(result))
        return
    note(f"from {result.a} to {result.b}")
    for text in result.notes:
        note(f"note: {text}")
    kinds = result.by_kind
    print_table(
        [movement_row(movement) for movement in kinds[:top]],
        ("change", "max", "cosine", "equal", "most", "parameter"),
    )
    if len(kinds) > top:
        say(f"... {len(kinds) - top:,} more that changed less: --top {len(kinds)} lists them")
    total = result.whole
    angle = f", cosine {cosine(total)}" if cosine(total) else ""
    say(
        f"all of {count(total.tensors, 'tensor')} together: change {total.change:.3g}{angle}, "
        f"{per_cent(total.equal)} equal"
    )


def movement_row(movement: Movement) -> tuple[str, ...]:
    """Return a row of the table."""
    distance = movement.distance
    layers = ".".join(word for word in movement.peak.split(".") if word.isdecimal())
    return (
        f"{movement.change:.3g}",
        f"{distance.max_abs:.3g}" + (f", {distance.strange:,} NaN/Inf" if distance.strange else ""),
        cosine(movement),
        per_cent(movement.equal),
        layers if movement.tensors > 1 else "",
        with_count(movement.name, movement.tensors),
    )


def cosine(movement: Movement) -> str:
    value = movement.distance.cosine
    return "" if value is None else f"{value:.4f}"


def to_json(result: Moved) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    moved = [
        pick(movement, "name", "change", "equal") | pick(movement.distance, "max_abs", "cosine", "strange")
        for movement in result.tensors
    ]
    return {"moved": moved, "equal": result.whole.equal, **pick(result, "a", "b", "notes")}
