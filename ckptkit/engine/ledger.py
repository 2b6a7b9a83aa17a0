"""Keep account of the bytes that were read and written, by whichever process, and of their CRC-32. Reads no file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptkit.files.crc32 import Checksums
from ckptkit.layout import Chunk, Piece, Place

SourcePlace = tuple[int, str, int]  # a source's number in the plan, a file and an offset in it


def checked_place(number: int, chunk: Chunk) -> SourcePlace:
    """Return the place of the bytes that are compared with a CRC-32 when a chunk is: a storage's, or its own."""
    whole = chunk.checked_as
    return number, chunk.path, chunk.offset if whole is None else whole.offset


@dataclass(slots=True)
class Ledger:
    """The pieces of source chunks that were read, and of destination chunks that were written, with their CRC-32.

    Pieces of chunks that lie in one storage are known by that. `noted` are the tensors that a combination said are
    worth a note.
    """

    read: Checksums[SourcePlace] = field(default_factory=Checksums)
    written: Checksums[Place] = field(default_factory=Checksums)
    noted: set[str] = field(default_factory=set)

    def add(self, other: Ledger) -> None:
        """Take over the entries of another."""
        for place, *piece in other.read:
            self.read.add(place, *piece)
        for target, *piece in other.written:
            self.written.add(target, *piece)
        self.noted |= other.noted

    def add_read(self, number: int, pieces: Iterable[Piece]) -> None:
        """Enter what was read of the source of this number."""
        for piece in pieces:
            place = checked_place(number, piece.chunk)
            start = piece.chunk.offset + piece.start - place[2]
            self.read.add(place, start, piece.length, piece.crc)

    def to_json(self) -> dict[str, Any]:
        """Return the entries as lists of place, start, length and CRC-32, and the names."""
        read = [[*place, *piece] for place, *piece in self.read]
        written = [[*place, *piece] for place, *piece in self.written]
        return {"read": read, "written": written, "noted": sorted(self.noted)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Ledger:
        """Return the ledger that `to_json` described. Raises KeyError, TypeError or ValueError for anything else."""
        ledger = cls()
        for source, path, *numbers in value["read"]:
            offset, start, length, crc = map(int, numbers)
            ledger.read.add((int(source), str(path), offset), start, length, crc)
        for path, *numbers in value["written"]:
            offset, start, length, crc = map(int, numbers)
            ledger.written.add((str(path), offset), start, length, crc)
        ledger.noted.update(map(str, value["noted"]))
        return ledger
