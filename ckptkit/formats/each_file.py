"""Read the files of all ranks one by one, and continue after a file that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ckptkit.errors import CkptError, Report

Key = TypeVar("Key")
Value = TypeVar("Value")


def read_each_file(
    root: Path, files: Mapping[Key, str], read: Callable[[Key, str], Value], report: Report
) -> dict[Key, Value]:
    """Return the result of `read` for each file in `root`, by its key, in order. Reports those that cannot be read."""
    results: dict[Key, Value] = {}
    for key, name in files.items():
        try:
            results[key] = read(key, name)
        except CkptError as error:
            report(error.blame(path=root / name))
    return results
