"""Report the progress of a request to its caller. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (bytes just done, bytes in all)
BytesDone = Callable[[int], None]  # (bytes just done), from one thread at a time


def make_progress_reporter(progress: Progress | None, total: int) -> BytesDone | None:
    """Return a function that reports bytes just done to `progress`, with the total; None without `progress`."""
    return progress and (lambda nbytes: progress(nbytes, total))
