"""Ledgers: which bytes of which chunks were read and written, and their CRC-32, whoever did it. Reads no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptkit.files.crc32 import Checksums
from ckptkit.layout import Place

Entries = Checksums[Place]


@dataclass(slots=True)
class Ledger:
    """Pieces of source chunks read, and of destination chunks written, each chunk known by its file and offset."""

    read: Entries = field(default_factory=Checksums)
    written: Entries = field(default_factory=Checksums)

    def add(self, other: Ledger) -> None:
        """Take over the entries of another."""
        for ours, theirs in ((self.read, other.read), (self.written, other.written)):
            for (path, offset), start, length, crc in theirs:
                ours.add((path, offset), start, length, crc)

    def to_json(self) -> dict[str, Any]:
        """The entries as lists of file, offset of the chunk, start, length and CRC-32."""
        return {"read": list(flat(self.read)), "written": list(flat(self.written))}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Ledger:
        """The ledger that `to_json` described. Raises KeyError, TypeError or ValueError for anything else."""
        ledger = cls()
        for name, entries in (("read", ledger.read), ("written", ledger.written)):
            for path, *numbers in value[name]:
                offset, start, length, crc = map(int, numbers)
                entries.add((str(path), offset), start, length, crc)
        return ledger


def flat(entries: Entries) -> Iterator[list[str | int]]:
    """Each entry as a list."""
    for (path, offset), start, length, crc in entries:
        yield [path, offset, start, length, crc]
