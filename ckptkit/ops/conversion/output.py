"""Outputs: where a conversion writes, how, and by how many processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptkit.progress import Progress

Meet = Callable[[], None]  # returns when all have called it, to the one that finishes; to the others at once


@dataclass(frozen=True, slots=True)
class Workers:
    """By how many processes, of which this one does share `number`, or None of what they share.

    One `finishes`: it does what only one can do, and fails if a share has not been done. Those that run at the same
    time `meet` before.
    """

    count: int = 1
    number: int | None = 0
    finishes: bool = True
    meet: Meet | None = None


ALONE = Workers()


@dataclass(frozen=True, slots=True)
class Output:
    """Where and how to write, and by whom; a directory, unless it `is_file`."""

    path: Path
    overwrite: bool = False
    sync: bool = True
    jobs: int | None = None
    progress: Progress | None = None
    workers: Workers = ALONE
    is_file: bool = False
