"""Tell a caller how far its request is. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Progress = Callable[[int, int], None]  # (bytes just done, bytes in all)
Told = Callable[[int], None]  # (bytes just done)


def report_progress(progress: Progress | None, total: int) -> Told | None:
    """Return a function that tells `progress`, if there is one, of bytes just done and of how many there are in all."""
    return progress and partial(tell, progress, total)


def tell(progress: Progress, total: int, nbytes: int) -> None:
    """Tell of bytes just done, and how many there are in all."""
    progress(nbytes, total)
