"""Keep a run in a local directory, or in several that are one: by locks, renames and small files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import translate_os_errors
from ckptkit.io.joined import roots_of
from ckptkit.io.staging import clear_dead
from ckptkit.runs import watches
from ckptkit.runs.complete import require_complete
from ckptkit.runs.deletion import delete, deleting, is_being_written
from ckptkit.runs.holds import marks_on
from ckptkit.runs.keeper import WatchPost
from ckptkit.runs.pins import clear_pin, set_pin

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
    def watching(self, key: str, longest: float) -> Iterator[WatchPost]:  # noqa: ARG002 - a lock ends with its process
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

    def hold(self, checkpoint: Path) -> None:
        """Write the name of a checkpoint into the locked file, while nobody deletes."""
        watches.hold(self.lock, checkpoint)

    def let_go(self) -> None:
        """Empty the locked file."""
        watches.let_go(self.lock)

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
