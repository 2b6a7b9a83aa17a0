"""Print which tensors of a damaged checkpoint were lost, and which came from another checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptkit.checkpoints.account import NAME, Account, Filled, Lost
from ckptkit.cli.output import note
from ckptkit.errors import and_more
from ckptkit.words import count, format_bytes, natural

_MOST_FAULTS, _MOST_LINES, _MOST_TENSORS = 8, 16, 4
_LAYER = re.compile(r"(.*?\.[0-9]+)\.(.*)")


def report_salvage(found: Account, output: Path, *, dry_run: bool) -> None:
    """Say on stderr what was lost, by the files and layers that it was in, and what to do about it."""
    if found.repaired:
        note(
            f"note: {count(len(found.repaired), 'damaged tensor')} had another copy in the checkpoint, which was taken"
        )
    if found.filled:
        report_filled(found.filled)
    if found.is_whole:
        note(f"note: nothing was lost: {output} is complete")
    if found.lost:
        report_lost(found, output, dry_run=dry_run)
    if found.lost and not found.filled:
        note("hint: --fill-from OTHER takes them from an earlier step, or from the model that the training began with")


def report_filled(filled: Sequence[Filled]) -> None:
    """Say how much was taken from elsewhere, and from where."""
    by_source: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in filled:
        by_source[one.source, one.cast].append(one.name)
    for (source, cast), names in by_source.items():
        note(f"filled {count(len(names), 'tensor')} from {source}{f', cast {cast}' if cast else ''}")
        for layer, inside in by_layer(names):
            note(f"  {layer}  {inside}")


def report_lost(found: Account, output: Path, *, dry_run: bool) -> None:
    """Say what was lost, file by file."""
    named = [one for one in found.lost if one.name]
    size = format_bytes(sum(one.nbytes for one in named))
    total = found.kept + len(named)
    where = f"{output} would not contain them" if dry_run else f"its {NAME} lists them"
    note(f"lost: {len(named):,} of {count(total, 'entry')} ({size}) are not in {output}; {where}")
    faults: dict[str, list[Lost]] = defaultdict(list)
    for one in found.lost:
        faults[one.describe(found.source)].append(one)
    for fault, lost in list(faults.items())[:_MOST_FAULTS]:
        note(f"  {fault}")
        for layer, inside in by_layer([one.label for one in lost if one.name]):
            note(f"    {layer}  {inside}")
        if not all(one.name for one in lost):
            note("    no file lists its contents")
    if len(faults) > _MOST_FAULTS:
        note(f"  ... and for {count(len(faults) - _MOST_FAULTS, 'more reason')}")


def by_layer(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return names in a line for each layer, or for all that lack the same, padded to one width; of many the first."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.fullmatch(name)
        layer, inner = (match[1], match[2]) if match else ("", name)
        layers[layer].append(inner)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for layer, inside in sorted(layers.items(), key=lambda one: natural(one[0])):
        above, _, number = layer.rpartition(".")
        alike[above, some(inside)].append(number)
    lines = [(f"{above}.{spans(numbers)}" if above else "", inside) for (above, inside), numbers in alike.items()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], ("...", f"and {count(len(lines) - _MOST_LINES, 'line')} more like these")]
    width = max((len(layer) for layer, _ in lines), default=0)
    return [(layer.ljust(width), inside) for layer, inside in lines]


def spans(numbers: Sequence[str]) -> str:
    """Return the numbers of layers, given in order: `0-3,5`."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_TENSORS]) + and_more(len(names) - _MOST_TENSORS)
