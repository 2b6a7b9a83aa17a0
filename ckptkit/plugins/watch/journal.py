"""Record what a watch did with each checkpoint, so that a restart does not repeat it.

The journal is a small JSON file next to the watch's lock: in the run's directory, or in this machine's cache if the
run is in a store. Every change replaces the file atomically and syncs it to disk before the work continues.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt
from ckptkit.io.file import read_small
from ckptkit.io.staging import publish_file

_LIMIT = 1 << 26  # bytes: about 400,000 checkpoints
_STATES = ("begun", "done", "failed", "missed")


@dataclass(frozen=True, slots=True)
class HandledRecord:
    """What a watch has done with a checkpoint saved at `saved_ns`: it ran the first `commands_done` commands.

    While the next command runs, `state` is "begun", and `out_before` is the inode and modification time of the output
    before the command began. `is_weights_only` means that the checkpoint was not demoted later.
    """

    state: str
    saved_ns: int
    commands_done: int = 0
    out_before: tuple[int, int] | None = None
    is_weights_only: bool = False

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> HandledRecord:
        """Return the record in a JSON object. Raises `ValueError`, `TypeError` or `KeyError` for invalid data."""
        before = found["out_before"]
        numbers = [found["saved_ns"], found["commands_done"], *(before or (0, 0))]
        if found["state"] not in _STATES or not all(isinstance(number, int) for number in numbers):
            raise ValueError
        inode_and_time = (int(numbers[2]), int(numbers[3])) if before else None
        is_weights_only = found.get("is_weights_only") is True  # of a journal before 0.2: unknown
        return cls(found["state"], found["saved_ns"], found["commands_done"], inode_and_time, is_weights_only)


@dataclass(frozen=True)
class WatchJournal:
    """The journal of the watch `key` in a directory: one entry per checkpoint name."""

    folder: Path
    key: str
    about: Mapping[str, Any]
    entries: dict[str, HandledRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, key: str, about: Mapping[str, Any]) -> WatchJournal:
        """Open the journal of a watch, empty without a file. Raises `Corrupt` if the file is not a journal."""
        journal = cls(folder, key, about)
        path = journal.path
        if path.exists():
            try:
                records = json.loads(read_small(path, _LIMIT))["checkpoints"]
                journal.entries.update({str(name): HandledRecord.from_json(record) for name, record in records.items()})
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                hint = "remove the file: then every checkpoint is handled again"
                raise Corrupt("not the journal of a watch", path=path, hint=hint) from error
        return journal

    @property
    def path(self) -> Path:
        return self.folder / f"{self.key}.json"

    def write_record(self, name: str, entry: HandledRecord) -> None:
        self.entries[name] = entry
        checkpoints = {name: asdict(entry) for name, entry in self.entries.items()}
        content = json.dumps({**self.about, "checkpoints": checkpoints}, indent=1).encode()
        publish_file(self.path, content, overwrite=True)
