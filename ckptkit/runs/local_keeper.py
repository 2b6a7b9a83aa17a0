"""Keep a run in a local directory, or in several that are one.

By locks, renames and small files, which also say what stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from ckptkit import trainers
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.evidence import read_number
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported, translate_os_errors
from ckptkit.formats.archives.values import load_value
from ckptkit.io.file import folders
from ckptkit.io.joined import roots_of
from ckptkit.io.staging import clear_dead
from ckptkit.layout import KeyPath
from ckptkit.runs import watches
from ckptkit.runs.deletion import delete, deleting, is_being_written
from ckptkit.runs.keeper import WatchLease, require_complete
from ckptkit.runs.pins import clear_pin, is_pinned, set_pin
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


_PATIENCE = 10.0  # seconds that a pin waits for others to end deleting


@dataclass(frozen=True, slots=True)
class LocalKeeper:
    """The keeper of the run in a local directory `root`."""

    root: Path

    def refresh(self) -> None:
        """Do nothing: the disk is asked every time."""

    def is_there(self) -> bool:
        """Return whether there is a directory."""
        with translate_os_errors(self.root):
            return self.root.is_dir()

    @contextmanager
    def pruning(self) -> Iterator[None]:
        """Be the only process that deletes here, and remove what dead processes left."""
        with deleting(self.root):
            for place in roots_of(self.root):
                clear_dead(place)
            yield

    def delete(self, checkpoint: Path) -> tuple[str, ...]:
        """Delete a checkpoint, from all directories, unless something holds it."""
        held = self.holds(checkpoint)
        if not held:
            delete(checkpoint)
        return held

    def unfinished(self) -> dict[Path, str]:
        """Return nothing: `pruning` has finished what a dead process began, under a hidden name."""
        return {}

    def work_on(self, checkpoint: Path) -> str | None:
        """Return that a process holds the lock on a checkpoint."""
        return "being written" if is_being_written(checkpoint) else None

    def holds(self, checkpoint: Path) -> tuple[str, ...]:
        """Return what keeps a checkpoint; on several disks a reason on any of them counts."""
        places = [root / checkpoint.name for root in roots_of(checkpoint.parent)]
        return tuple(dict.fromkeys(hold for place in places for hold in holds_in(place)))

    def pin(self, checkpoint: Path) -> None:
        """Pin a complete checkpoint while nobody deletes: else it could be gone between a look at it and the pin."""
        with deleting(self.root, patience=_PATIENCE):
            require_complete(checkpoint)
            set_pin(checkpoint)

    def unpin(self, checkpoint: Path) -> None:
        """Remove the file of a pin."""
        clear_pin(checkpoint)

    @contextmanager
    def watching(self, key: str, longest: float) -> Iterator[WatchLease]:  # noqa: ARG002 - a lock ends with its process
        """Lock the file of a watch in the run."""
        with watches.claiming(self.root, key) as lock:
            yield LocalPost(self.root, key, lock)


@dataclass(frozen=True, slots=True)
class LocalPost:
    """The post of the watch `key` in the run at `root`: the file of its lock names what it holds."""

    root: Path
    key: str
    lock: int

    @property
    def folder(self) -> Path:
        """Return the directory for the journal, in the run."""
        return self.root / watches.FOLDER

    def protect(self, checkpoint: Path) -> None:
        """Write the name of a checkpoint into the locked file, while nobody deletes."""
        watches.protect(self.lock, checkpoint)

    def unprotect(self) -> None:
        """Empty the locked file."""
        watches.unprotect(self.lock)

    def clock_ns(self) -> int:
        """Return the time of the file system."""
        with translate_os_errors(self.root):
            return watches.clock_of(self.lock)

    def require_place(self) -> None:
        """Raise `NotACheckpoint` if the run was moved or removed."""
        watches.require_place(self.lock, self.root, self.key)


def holds_in(checkpoint: Path) -> Iterator[str]:
    """Yield what keeps a checkpoint in one directory of a run; the checkpoint itself may lie in another."""
    yield from marks_on(checkpoint)
    if watches.is_held(checkpoint):
        yield "a watch is handling it"
