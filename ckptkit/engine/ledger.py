"""Keep account of the bytes that were read and written, by whichever process, and of their CRC-32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptkit.io.crc32 import Checksums
from ckptkit.layout import Chunk, FileOffset, ReadRun

SourcePlace = tuple[int, str, int]  # a source's number in the plan, a file and an offset in it


@dataclass(slots=True)
class Ledger:
    """The pieces of source chunks that were read, and of destination chunks that were written, with their CRC-32.

    `noted` are the tensors that a combination said are worth a note, `resumed_bytes` the bytes of `written` that an
    earlier call had written.
    """

    read: Checksums[SourcePlace] = field(default_factory=Checksums)
    written: Checksums[FileOffset] = field(default_factory=Checksums)
    noted: set[str] = field(default_factory=set)
    resumed_bytes: int = 0

    def add(self, other: Ledger) -> None:
        """Take over the entries of another."""
        for place, *piece in other.read:
            self.read.add(place, *piece)
        for target, *piece in other.written:
            self.written.add(target, *piece)
        self.noted |= other.noted

    def add_read(self, number: int, pieces: Iterable[ReadRun]) -> None:
        """Enter what was read of the source of this number, where its CRC-32 was computed."""
        for piece in pieces:
            if piece.crc is not None:
                path, offset, start = place_in_run(piece.chunk, piece.start)
                self.read.add((number, path, offset), start, piece.length, piece.crc)

    def add_written(self, chunk: Chunk, start: int, length: int, crc: int) -> None:
        """Enter what was written of a destination chunk: bytes from `start`."""
        path, offset, start = place_in_run(chunk, start)
        self.written.add((path, offset), start, length, crc)

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


def place_in_run(chunk: Chunk, start: int) -> tuple[str, int, int]:
    """Return file and offset of the bytes that a chunk was cut out of, and where in them its byte `start` is."""
    offset, _ = chunk.bytes
    return chunk.path, offset, chunk.offset - offset + start
