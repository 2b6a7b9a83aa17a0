"""Tell the step of a checkpoint by the name of its directory or file."""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.trainers import number_in

NUMBER = re.compile(r"[0-9]{1,18}")
ONE_FILE = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")  # how the name of a checkpoint that is a file may end


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory, or the epoch if that is all it says; None otherwise."""
    step = number_in(path.name, "steps")
    return number_in(path.name, "epochs") if step is None else step


def is_epoch(path: Path) -> bool:
    """Return whether a checkpoint's name says an epoch only, which cannot be compared with steps."""
    return number_in(path.name, "steps") is None and number_in(path.name, "epochs") is not None


def step_of_place(path: Path) -> int | None:
    """Return the step in the name of a directory, or of the one that it lies in; None if neither has one."""
    path = path.absolute()
    own = step_of(path)
    return step_of(path.parent) if own is None else own


def may_be_step_name(name: str) -> bool:
    """Return whether a directory's name is like a checkpoint's, or a mere number, as some trainers have it."""
    return step_of(Path(name)) is not None or bool(NUMBER.fullmatch(name))


def may_be_step(path: Path) -> bool:
    """Return whether an entry of a run is named like a checkpoint."""
    if path.is_dir():
        return may_be_step_name(path.name)
    return path.suffix in ONE_FILE and step_of(Path(path.stem)) is not None
