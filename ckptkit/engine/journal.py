"""Keep a journal, on disk beside the work, of the units of a share that are finished, so that the work can be resumed.

A line for each unit that was finished, and one when the share was. A line says what was written, not that the disk has
it: it is believed after the bytes have been read again, unless the worker ended, whose files were on the disk before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckptkit.engine.ledger import Ledger
from ckptkit.errors import translate_os_errors
from ckptkit.io.disk import again
from ckptkit.io.file import opening, read_at
from ckptkit.io.local import LocalFile

_ENDED = b'{"ended": true}\n'


class Journal:
    """The journal of one worker, in a file that is made when the first line is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.units: dict[int, Ledger] = {}
        self.has_ended = False
        self._nbytes = 0  # of whole lines; what a dying worker left behind them is written over
        with translate_os_errors(path):
            if path.exists():
                self._load()

    def _load(self) -> None:
        with opening(self.path) as file:
            data = read_at(file, file.size, 0)
        for line in data.splitlines(keepends=True):
            try:
                entry = json.loads(line)
                if line == _ENDED:
                    self.has_ended = True
                else:
                    self.units[int(entry["unit"])] = Ledger.from_json(entry)
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
                return
            if not line.endswith(b"\n"):
                return
            self._nbytes += len(line)

    def note(self, unit: int, ledger: Ledger) -> None:
        """Note that a unit is finished, and what was read and written for it."""
        self.units[unit] = ledger
        self._append(json.dumps({"unit": unit, **ledger.to_json()}).encode() + b"\n")

    def end(self, *, sync: bool) -> None:
        """Note that the share is finished; its files are on the disk if `sync`, and then so is the journal."""
        self.has_ended = True
        self._append(_ENDED, sync=sync)

    def _append(self, line: bytes, *, sync: bool = False) -> None:
        with translate_os_errors(self.path):
            again(self.path.parent.mkdir, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            file = LocalFile(self.path, fd)
            try:
                os.ftruncate(fd, self._nbytes)
                file.write_at(memoryview(line), self._nbytes)
                if sync:
                    os.fsync(fd)
            finally:
                file.close()
        self._nbytes += len(line)
