"""Keep on disk, in the run, what has been done with each checkpoint, so that it is done once across restarts.

A small file of JSON beside the lock of the watch, replaced whole at each note; that is on disk before work goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.destinations.staging import publish
from ckptkit.errors import Corrupt
from ckptkit.files.file import read_small
from ckptkit.runs.watches import FOLDER

_LIMIT = 1 << 26  # bytes: about 400,000 checkpoints
_STATES = ("begun", "done", "failed", "missed")


@dataclass(frozen=True, slots=True)
class WatchEntry:
    """The fate of a checkpoint that was saved at `saved_ns`: of the commands the first `commands_done` are done.

    While the next one runs `state` is "begun", and `out_before` says what was at `{out}` when it was: inode and time.
    """

    state: str
    saved_ns: int
    commands_done: int = 0
    out_before: tuple[int, int] | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> WatchEntry:
        """Read one. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        before = found["out_before"]
        numbers = [found["saved_ns"], found["commands_done"], *(before or (0, 0))]
        if found["state"] not in _STATES or not all(isinstance(number, int) for number in numbers):
            raise ValueError
        inode_and_time = (int(numbers[2]), int(numbers[3])) if before else None
        return cls(found["state"], found["saved_ns"], found["commands_done"], inode_and_time)


@dataclass(frozen=True)
class WatchJournal:
    """The notes of the watch `key` in the run at `root`: an entry for each checkpoint by name, and what is done.

    Raises `Corrupt` for a file that holds something else.
    """

    root: Path
    key: str
    about: Mapping[str, Any]
    entries: dict[str, WatchEntry] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, key: str, about: Mapping[str, Any]) -> WatchJournal:
        """Open the journal of the watch of this key in the run at `root`, be there one or not."""
        made = cls(root, key, about)
        path = made.path
        if path.exists():
            try:
                found = json.loads(read_small(path, _LIMIT))["checkpoints"]
                made.entries.update({str(name): WatchEntry.from_json(one) for name, one in found.items()})
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                hint = "remove the file: then every checkpoint is handled again"
                raise Corrupt("not the journal of a watch", path=path, hint=hint) from error
        return made

    @property
    def path(self) -> Path:
        """Return the file that they are in."""
        return self.root / FOLDER / f"{self.key}.json"

    def note(self, name: str, entry: WatchEntry) -> None:
        """Note what is true of a checkpoint now."""
        self.entries[name] = entry
        checkpoints = {name: asdict(entry) for name, entry in self.entries.items()}
        content = json.dumps({**self.about, "checkpoints": checkpoints}, indent=1).encode()
        publish(self.path, content, overwrite=True)
