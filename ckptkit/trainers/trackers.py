"""Read trackers: files and links of trainers that say which checkpoint of a run is meant.

A file holds the name of a checkpoint or its step, in JSON where its trainer keeps more in it. A link, whatever its
name, means the checkpoint that it leads to or into; a link that leads out of the run means none. Trainers resume from
the checkpoint that some of them name; others name the best one.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptkit import trainers
from ckptkit.errors import Corrupt, Unsafe, translate_os_errors
from ckptkit.io.file import children, entry_of, read_small
from ckptkit.trainers import step_of

_LIMIT = 1 << 10  # bytes
_LIMIT_OF_JSON = 1 << 24  # bytes: metrics of all checkpoints may be in it
_OF_STORES = ".symlink"  # a file that stands for a link in a store without links, and holds a whole path
_LATEST = re.compile(r"(?:.*[-_.])?(?:last|latest)(?:[-_.].*)?", re.IGNORECASE | re.DOTALL)  # a link to resume from


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file or link called `name` that means `target`: the name of a checkpoint, or its step.

    With `is_latest`, it says which checkpoint to resume from.
    """

    name: str
    target: str
    is_latest: bool = False

    def means(self, checkpoint: Path) -> bool:
        """Return whether it is this checkpoint of the run that is meant."""
        if checkpoint.name == self.target:
            return True
        step = int(checkpoint.name) if checkpoint.name.isdecimal() else step_of(checkpoint)
        return self.target.isdecimal() and step == int(self.target)


def trackers_in(root: Path) -> list[Tracker]:
    """Return the trackers of the run in directory `root`, by name, but for those that say nothing of use."""
    found = ((path, read_tracker(path)) for path in children(root) if not path.name.startswith("."))
    return [Tracker(path.name, target, is_for_resuming(path)) for path, target in found if target]


def is_for_resuming(path: Path) -> bool:
    """Return whether a tracker says which checkpoint to resume from, and not which is the best."""
    if path.is_symlink():
        return _LATEST.fullmatch(path.name) is not None
    return not trainers.names_best(path.name)


def read_tracker(path: Path) -> str | None:
    """Return the name or step that one says, None if it is no tracker or says neither."""
    with translate_os_errors(path):
        if path.is_symlink():
            return entry_of(path.parent, os.readlink(path))
        if not trainers.is_tracker(path.name) or not path.is_file():
            return None
    try:
        text = read_text(path)
    except (Corrupt, Unsafe, ValueError, RecursionError):
        return None  # what says nothing keeps nothing; what cannot be read might
    if path.suffix == _OF_STORES:
        text = PurePosixPath(text).name
    is_name = text.isprintable() and text not in (".", "..") and not set(text) & set("/\\")
    return text if is_name else None


def read_text(path: Path) -> str:
    """Return the name or step in a tracker, "" if its JSON has none. Raises `ValueError` for what is no text."""
    keys = trainers.json_trackers().get(path.name)
    if keys is None:
        return read_small(path, _LIMIT).decode("ascii").strip()
    found = json.loads(read_small(path, _LIMIT_OF_JSON))
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""
