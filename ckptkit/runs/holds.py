"""Find the marks in a run that keep a checkpoint, whatever the rules say: a pin, and what its trainer names."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from ckptkit import trainers
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.evidence import read_number
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported
from ckptkit.formats.archives.values import load_value
from ckptkit.io.file import folders
from ckptkit.layout import KeyPath
from ckptkit.runs.pins import is_pinned
from ckptkit.trainers.trackers import trackers_in


def named_best(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each best checkpoint that something in the run at `root` notes, and where it is noted."""
    for place in (root, *folders(root)):
        for file, key in trainers.best_keys():
            path = place / file if file else place
            if path.exists() and (file or place != root):
                yield from read_best(path, file, key, path.stat().st_mtime_ns)


@lru_cache(maxsize=4096)  # each checkpoint that may be deleted asks all others
def read_best(path: Path, file: str, key: KeyPath, changed: int) -> tuple[tuple[str, str], ...]:  # noqa: ARG001
    """Return the names that lie at a key path of a small file or of a checkpoint's own entries."""
    # a run on Windows has backslashes in it, and PureWindowsPath also knows slashes
    values = [read_number(path, key)] if file else entries_at(path, key)
    names = (PureWindowsPath(value).name for value in values if isinstance(value, str))
    return tuple((name, f"{file or 'the checkpoint'} says `{key[-1]}`") for name in names if name)


def entries_at(path: Path, key: KeyPath) -> Iterator[object]:
    """Yield the values in a checkpoint whose key paths match one with "*" for any key; none if it cannot be read."""
    try:
        layouts = [component.layout for component in Checkpoint.at(path).components]
        for layout in layouts:
            for name, blob in layout.blobs.items():
                found = layout.key(name)
                if len(found) == len(key) and all(map(fnmatchcase, map(str, found), map(str, key))):
                    yield load_value(layout.root, blob)
    except (Corrupt, IOFailure, Unsafe, Unsupported):
        return


def marks_on(checkpoint: Path) -> Iterator[str]:
    """Yield the marks on a checkpoint in one directory of a run."""
    if is_pinned(checkpoint):
        yield "pinned"
    yield from (f"`{found.name}` names it" for found in trackers_in(checkpoint.parent) if found.means(checkpoint))
    best = (why for name, why in named_best(checkpoint.parent) if name == checkpoint.name)
    yield from (f"the best: {why}" for why in dict.fromkeys(best))
