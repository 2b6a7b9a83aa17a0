"""Keep account of the bytes that were read and written, by any process, and of their CRC-32.

A journal on disk lists the finished units of a share, so an interrupted conversion can resume.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import translate_os_errors
from ckptkit.io.crc32 import Checksums
from ckptkit.io.disk import retry_interrupted
from ckptkit.io.file import opening, read_at
from ckptkit.io.local_file import LocalFile
from ckptkit.layout import Chunk, FileOffset

# The journal has one line per finished unit, and a last line when the share is finished. A line says what was written,
# not that it reached the disk. On resume ckptkit therefore reads the bytes of a unit again before it trusts the line,
# unless the worker ended: it synced its files before the last line.
_ENDED = b'{"ended": true}\n'


class Journal:
    """The journal of one worker. Its file is created when the first line is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.units: dict[int, Ledger] = {}
        self.has_ended = False
        self._nbytes = 0  # of complete lines; the next line overwrites what a killed worker left after them
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
                # a damaged line ends the journal: the units after it are done again
                return
            if not line.endswith(b"\n"):
                return
            self._nbytes += len(line)

    def record_unit(self, unit: int, ledger: Ledger) -> None:
        self.units[unit] = ledger
        self._append(json.dumps({"unit": unit, **ledger.to_json()}).encode() + b"\n")

    def record_end(self, *, sync: bool) -> None:
        """Record that the share is finished. With `sync` its files are on the disk, and the journal is synced too."""
        self.has_ended = True
        self._append(_ENDED, sync=sync)

    def _append(self, line: bytes, *, sync: bool = False) -> None:
        with translate_os_errors(self.path):
            retry_interrupted(self.path.parent.mkdir, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            file = LocalFile(self.path, fd)
            try:
                # drop what a killed worker left of a line
                os.ftruncate(fd, self._nbytes)
                file.write_at(memoryview(line), self._nbytes)
                if sync:
                    os.fsync(fd)
            finally:
                file.close()
        self._nbytes += len(line)


SourcePlace = tuple[int, str, int]  # index of a source in the plan, file, byte offset


@dataclass(slots=True)
class Ledger:
    """The byte ranges of source chunks that were read, and of destination chunks that were written, with their CRC-32.

    `noted` are the tensors on which a recipe has a remark, `resumed_bytes` the bytes of `written` that an earlier call
    wrote.
    """

    read: Checksums[SourcePlace] = field(default_factory=Checksums)
    written: Checksums[FileOffset] = field(default_factory=Checksums)
    noted: set[str] = field(default_factory=set)
    resumed_bytes: int = 0

    def add_ledger(self, other: Ledger) -> None:
        for place, *piece in other.read:
            self.read.add(place, *piece)
        for target, *piece in other.written:
            self.written.add(target, *piece)
        self.noted |= other.noted

    def to_json(self) -> dict[str, Any]:
        """Return the entries as lists of place, start, length and CRC-32, and the noted names."""
        read = [[*place, *piece] for place, *piece in self.read]
        written = [[*place, *piece] for place, *piece in self.written]
        return {"read": read, "written": written, "noted": sorted(self.noted)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Ledger:
        """Return the ledger from `to_json`. Raises KeyError, TypeError or ValueError for any other value."""
        ledger = cls()
        for source, path, *numbers in value["read"]:
            offset, start, length, crc = map(int, numbers)
            ledger.read.add((int(source), str(path), offset), start, length, crc)
        for path, *numbers in value["written"]:
            offset, start, length, crc = map(int, numbers)
            ledger.written.add((str(path), offset), start, length, crc)
        ledger.noted.update(map(str, value["noted"]))
        return ledger


def locate_in_checksummed_range(chunk: Chunk, start: int) -> tuple[str, int, int]:
    """Return file and offset of the byte range of a chunk, and the offset in that range of its byte `start`."""
    offset, _ = chunk.checksummed_range
    return chunk.path, offset, chunk.offset - offset + start
