"""Take snapshots of a checkpoint's files: are they still being written, and have they been replaced?"""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.errors import translate_os_errors
from ckptkit.io.file import names_in


@dataclass(frozen=True, slots=True)
class FileSnapshot:
    """The files of a checkpoint at one moment: relative path, size in bytes, modification time in nanoseconds."""

    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def try_take(cls, path: Path) -> FileSnapshot | None:
        """Return a snapshot of a checkpoint directory or file; None if a file disappears in the meantime."""
        with translate_os_errors(path):
            try:
                return cls(tuple(sorted(_file_states_below(path, ""))))
            except (FileNotFoundError, NotADirectoryError):
                return None

    @property
    def changed_ns(self) -> int:
        """Return the modification time of the newest file."""
        return max((changed for _, _, changed in self.files), default=0)

    @property
    def saved_ns(self) -> int:
        """Return the modification time of the largest file. Small files that are added later do not count."""
        return max(((size, changed) for _, size, changed in self.files), default=(0, 0))[1]


def _file_states_below(path: Path, name: str) -> list[tuple[str, int, int]]:
    state = path.stat() if not name else path.lstat()
    if stat.S_ISDIR(state.st_mode):
        return [entry for inside in names_in(path) for entry in _file_states_below(path / inside, f"{name}/{inside}")]
    return [(name, state.st_size, state.st_mtime_ns)] if stat.S_ISREG(state.st_mode) else []


@dataclass
class StabilityWait:
    """Wait until no file of a checkpoint has changed for `pause` seconds.

    A complete checkpoint is not enough: some trainers write the model before the other files, and the model alone looks
    like a complete checkpoint.
    """

    pause: float
    _last: dict[str, tuple[FileSnapshot, float]] = field(default_factory=dict)

    def has_been_stable(self, name: str, snapshot: FileSnapshot | None, now_ns: int) -> bool:
        """Return whether a checkpoint has been unchanged for `pause` seconds.

        This follows from the modification times, or from an equal snapshot `pause` seconds ago. `now_ns` is the current
        time of the clock that sets modification times: the clock of the file server, not of this host.
        """
        if snapshot is None:
            self._last.pop(name, None)
            return False
        if self.pause * 1e9 <= now_ns - snapshot.changed_ns:
            return True
        previous, since = self._last.get(name, (None, 0.0))
        if previous != snapshot:
            since = time.monotonic()
            self._last[name] = (snapshot, since)
        return time.monotonic() - since >= self.pause
