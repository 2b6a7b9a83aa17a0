"""Find the marks in a run that keep a checkpoint, whatever the rules say: a pin, and what its trainer names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.runs.best import named_best
from ckptkit.runs.pins import is_pinned
from ckptkit.trainers.trackers import trackers_in


def marks_on(checkpoint: Path) -> Iterator[str]:
    """Yield the marks on a checkpoint in one directory of a run."""
    if is_pinned(checkpoint):
        yield "pinned"
    yield from (f"`{found.name}` names it" for found in trackers_in(checkpoint.parent) if found.means(checkpoint))
    best = (why for name, why in named_best(checkpoint.parent) if name == checkpoint.name)
    yield from (f"the best: {why}" for why in dict.fromkeys(best))
