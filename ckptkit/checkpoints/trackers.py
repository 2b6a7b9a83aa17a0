"""Trackers: files and links of other trainers that say which checkpoint of a run is meant. Follows none out of the run.

DeepSpeed's `latest` holds a name, Megatron's and verl's `latest_checkpointed_iteration.txt` a step, and so on; and a
link, whatever its name, means the checkpoint that it leads to or into.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoints.runs import children, step_of
from ckptkit.errors import Corrupt, Unsafe, translate_os_errors
from ckptkit.files.file import read_small

_FILES = ("latest", "latest.txt", "latest_checkpointed_iteration.txt", "dlrover_latest.txt", "LATEST", "LOWEST_VAL")
_LIMIT = 1 << 10  # bytes


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file or link called `name` that means `target`: the name of a checkpoint, or its step."""

    name: str
    target: str

    def means(self, checkpoint: Path) -> bool:
        """True if it is this checkpoint of the run that is meant."""
        if checkpoint.name == self.target:
            return True
        return self.target.isdecimal() and step_of(checkpoint) == int(self.target)


def trackers_in(root: Path) -> list[Tracker]:
    """What the trackers of the run in directory `root` say, by name; those that say nothing of use are left out."""
    found = ((path.name, read_tracker(path)) for path in children(root) if not path.name.startswith("."))
    return [Tracker(name, target) for name, target in found if target]


def read_tracker(path: Path) -> str | None:
    """The name or step that one says, None if it is no tracker or says neither."""
    with translate_os_errors(path):
        if path.is_symlink():
            return entry_of(path.parent, os.readlink(path))
        if path.name not in _FILES or not path.is_file():
            return None
    try:
        text = read_small(path, _LIMIT).decode("ascii").strip()
    except (Corrupt, Unsafe, UnicodeDecodeError):
        return None  # what says nothing keeps nothing; what cannot be read might
    is_name = text.isprintable() and text not in (".", "..") and not set(text) & set("/\\")
    return text if is_name else None


def entry_of(root: Path, target: str) -> str | None:
    """The entry of directory `root` that a link in it leads to or into, None if it leads elsewhere."""
    place = Path(os.path.normpath(root.absolute() / target))
    return place.relative_to(root.absolute()).parts[0] if root.absolute() in place.parents else None
