"""Read the files of a checkpoint that several ranks wrote, one by one, and go on after one that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ckptkit.errors import CkptError, Report

Key = TypeVar("Key")
Value = TypeVar("Value")


def read_each(
    root: Path, files: Mapping[Key, str], read: Callable[[Key, str], Value], report: Report
) -> dict[Key, Value]:
    """Return what `read` gives for each file, by its key, in the same order; report those that cannot be read.

    `files` are names in directory `root`, by rank or whatever tells them apart.
    """
    found: dict[Key, Value] = {}
    for key, name in files.items():
        try:
            found[key] = read(key, name)
        except CkptError as error:
            report(error.blame(path=root / name))
    return found
