"""Record what a watch did with each checkpoint, so that a restart does not repeat it.

The journal is a small JSON file beside the lock of the watch: in a local run, or for a run in a store in the cache of
this machine. Every note replaces it, and is on disk before work goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt
from ckptkit.io.file import read_small
from ckptkit.io.staging import publish

_LIMIT = 1 << 26  # bytes: about 400,000 checkpoints
_STATES = ("begun", "done", "failed", "missed")


@dataclass(frozen=True, slots=True)
class HandledRecord:
    """What a watch has done with the checkpoint that was saved at `saved_ns`: the first `commands_done` commands.

    While the next command runs, `state` is "begun", and `out_before` is the inode and time of what was at `{out}` when
    the command began.
    """

    state: str
    saved_ns: int
    commands_done: int = 0
    out_before: tuple[int, int] | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> HandledRecord:
        """Return the fate that a JSON object says. Raises `ValueError`, `TypeError` or `KeyError` if it says none."""
        before = found["out_before"]
        numbers = [found["saved_ns"], found["commands_done"], *(before or (0, 0))]
        if found["state"] not in _STATES or not all(isinstance(number, int) for number in numbers):
            raise ValueError
        inode_and_time = (int(numbers[2]), int(numbers[3])) if before else None
        return cls(found["state"], found["saved_ns"], found["commands_done"], inode_and_time)


@dataclass(frozen=True)
class WatchJournal:
    """The journal of the watch `key` in a directory: an entry for each checkpoint, by name."""

    folder: Path
    key: str
    about: Mapping[str, Any]
    entries: dict[str, HandledRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, key: str, about: Mapping[str, Any]) -> WatchJournal:
        """Open the journal of a watch, empty if there is no file yet. Raises `Corrupt` if the file is no journal."""
        made = cls(folder, key, about)
        path = made.path
        if path.exists():
            try:
                found = json.loads(read_small(path, _LIMIT))["checkpoints"]
                made.entries.update({str(name): HandledRecord.from_json(one) for name, one in found.items()})
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                hint = "remove the file: then every checkpoint is handled again"
                raise Corrupt("not the journal of a watch", path=path, hint=hint) from error
        return made

    @property
    def path(self) -> Path:
        """Return the file of the journal."""
        return self.folder / f"{self.key}.json"

    def note(self, name: str, entry: HandledRecord) -> None:
        """Write what has become of a checkpoint to the disk."""
        self.entries[name] = entry
        checkpoints = {name: asdict(entry) for name, entry in self.entries.items()}
        content = json.dumps({**self.about, "checkpoints": checkpoints}, indent=1).encode()
        publish(self.path, content, overwrite=True)
