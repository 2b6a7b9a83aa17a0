"""Find optimizers whose groups of parameters are others than in a checkpoint that loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import rewrite
from ckptkit.diagnosis.finding import Finding
from ckptkit.errors import Corrupt
from ckptkit.layout import Layout
from ckptkit.optimizers.keys import IDS, NAMES, Optimizer, find_optimizers


def find_groups(case: Case) -> Iterator[Finding]:
    """Yield the optimizers that list their parameters in other groups, or by numbers where the other has names."""
    if case.like is None:
        return
    pairs = zip(optimizers_in(case.layout), optimizers_in(case.like.layout), strict=False)
    for ours, theirs in pairs:
        if ours.is_named != theirs.is_named:
            here, there = (NAMES if one.is_named else IDS for one in (ours, theirs))
            message = f"it has {here} for its parameters, that of {case.like.path} has {there}"
            yield Finding("optimizer_keys", ours.name, message, rewrite(case.checkpoint, "--optimizer-keys", there))
        else:
            yield from find_difference(ours, theirs, case.like.path)


def find_difference(ours: Optimizer, theirs: Optimizer, other: Path) -> Iterator[Finding]:
    """Yield the first difference of two optimizers' groups."""
    here, there = ([len(group) for group in one.groups] for one in (ours, theirs))
    if len(here) != len(there):
        message = (
            f"it has {len(here)} groups of parameters, that of {other} {len(there)}: "
            "torch ends with `loaded state dict has a different number of parameter groups`"
        )
        yield Finding("groups", ours.name, message)
    elif here != there:
        message = (
            f"its groups have {', '.join(map(str, here))} parameters, those of {other} {', '.join(map(str, there))}: "
            "torch ends with `loaded state dict contains a parameter group that doesn't match the size`"
        )
        yield Finding("groups", ours.name, message)
    elif ours.is_named and (moved := find_moved(ours, theirs)):
        name, one, two = moved
        yield Finding("groups", f"{ours.name}.{name}", f"it is in group {one}, and in group {two} in {other}")


def find_moved(ours: Optimizer, theirs: Optimizer) -> tuple[str, int, int] | None:
    """Return the first parameter that is in another group, with both."""
    places = {name: number for number, group in enumerate(theirs.groups) for name in group}
    moved = (
        (name, number, places[name])
        for number, group in enumerate(ours.groups)
        for name in group
        if places.get(name, number) != number
    )
    return next(moved, None)


def optimizers_in(layout: Layout) -> list[Optimizer]:
    """Return the optimizers with groups; none where these make no sense."""
    try:
        return find_optimizers(layout)
    except Corrupt:
        return []
