"""Put files together piece by piece. What is known of them lies in a directory; the data comes in blocks, in any order.

A piece goes to its taker when the block that brought its last byte is whole, and is held no longer. Blocks that come
nearly in order keep few pieces open: no piece waits for bytes that a thread has but is busy sending another. Pieces
that need no data go right before the next piece that does, so no taker waits for them. The CRC-32 of data, which some
formats record behind it, is filled in when the data is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import TracebackType

from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import Checksums, crc32
from ckptkit.io.file import open_file
from ckptkit.io.pieces import FilePiece, PieceTaker, cut_file, new_piece, piece_bytes

PieceKey = tuple[str, int]  # a file's name and a piece's number


@dataclass(slots=True)
class PendingBytes:
    """Data of `nbytes` that is still to come, and where in the same file its CRC-32 stands, in 4 bytes each."""

    nbytes: int
    crc_at: list[int] = field(default_factory=list)


class OwnPieces(threading.local):
    """Pieces that the thread at hand has made whole, and not sent yet."""

    def __init__(self) -> None:
        self.whole: list[FilePiece] = []


class Assembly:
    """Files of these `sizes` in bytes, of which directory `room` has all but the gaps; `taker` gets each whole piece.

    `gaps` are given by a file's name and an offset. With `only` pieces other than these are left to other processes.
    Several threads may write at the same time. `sent` are the pieces that were put.
    """

    def __init__(
        self,
        room: Path,
        sizes: Mapping[str, int],
        gaps: Mapping[tuple[str, int], PendingBytes],
        taker: PieceTaker,
        only: Iterable[PieceKey] | None = None,
    ) -> None:
        self.sent: set[PieceKey] = set()
        self._room = room
        self._sizes = sizes
        self._gaps = dict(gaps)
        self._taker = taker
        self._only = None if only is None else set(only)
        self._data: dict[PieceKey, memoryview] = {}
        self._sums: Checksums[tuple[str, int]] = Checksums()
        self._lock = threading.Lock()
        self._own = OwnPieces()
        self._missing: dict[PieceKey, int] = {}
        for (name, offset), gap in gaps.items():
            for start, nbytes in ((offset, gap.nbytes), *((at, 4) for at in gap.crc_at)):
                for piece, low, high in self.pieces_in(name, start, nbytes):
                    self._missing[piece.key] = self._missing.get(piece.key, 0) + high - low

    def at(self, place: str) -> AssembledFiles:
        """Return the files in a directory of the output, "" for the output itself, to be written."""
        return AssembledFiles(self, place)

    def write(self, name: str, data: memoryview, offset: int) -> None:
        """Write bytes that belong in gaps. No byte may be written twice. What is whole then is sent by `note`."""
        for piece, low, high in self.pieces_in(name, offset, len(data)):
            if not self.is_ours(piece):
                continue
            whole = self._open(piece)
            whole[low - piece.start : high - piece.start] = data[low - offset : high - offset]
            with self._lock:
                self._missing[piece.key] -= high - low
                is_whole = not self._missing[piece.key]
            if is_whole:
                self._own.whole += [*self._known_before(piece), piece]

    def note(self, name: str, offset: int, start: int, nbytes: int, crc: int) -> None:
        """Take note that of the gap at `offset` bytes from `start` were written, with this CRC-32.

        Sends the pieces that this thread has made whole, in the order of the file.
        """
        place = name, offset
        with self._lock:
            self._sums.add(place, start, nbytes, crc)
            gap = self._gaps.get(place)
            total = None if gap is None else self._sums.whole(place, gap.nbytes)
            if total is not None:
                del self._gaps[place]
        if gap is not None and total is not None:
            self.fill_in(name, gap, total)
        whole, self._own.whole = self._own.whole, []
        for piece in sorted(whole, key=attrgetter("start")):
            self._send(piece)

    def fill_in(self, name: str, gap: PendingBytes, crc: int) -> None:
        """Write the CRC-32 of a gap where it stands."""
        for at in gap.crc_at:
            self.write(name, memoryview(crc.to_bytes(4, "little")), at)

    def send_rest(self) -> None:
        """Put the pieces that needed no data and have none behind them that did."""
        for piece in self._pieces():
            if self.is_ours(piece) and piece.key not in self.sent and not self._missing.get(piece.key):
                self._send(piece)

    def stop(self, error: BaseException) -> None:
        """End the waiting of all threads, after an error of one."""
        self._taker.stop(error)

    def require_all(self) -> None:
        """Raise `Corrupt` unless all pieces have been put."""
        missing = [piece for piece in self._pieces() if self.is_ours(piece) and piece.key not in self.sent]
        if missing:
            piece = missing[0]
            message = f"{self._missing[piece.key]} bytes of piece {piece.number} of {piece.count} were not written"
            raise Corrupt(message, path=self._room / piece.name, offset=piece.start)

    def _known_before(self, piece: FilePiece) -> list[FilePiece]:
        """Return our pieces between this one and the last one before it that needs data."""
        found: list[FilePiece] = []
        for number in range(piece.number - 1, 0, -1):
            if (piece.name, number) in self._missing:
                break
            start = (number - 1) * piece_bytes(self._sizes[piece.name])
            found.append(FilePiece(piece.name, number, piece.count, start, piece_bytes(self._sizes[piece.name])))
        return [known for known in reversed(found) if self.is_ours(known)]

    def is_ours(self, piece: FilePiece) -> bool:
        return self._only is None or piece.key in self._only

    def _pieces(self) -> Iterator[FilePiece]:
        for name, size in self._sizes.items():
            yield from cut_file(name, size)

    def pieces_in(self, name: str, offset: int, nbytes: int) -> Iterator[tuple[FilePiece, int, int]]:
        """Yield the pieces of a file that have some of these bytes, and from where to where in the file."""
        size = self._sizes[name]
        length = piece_bytes(size)
        count = -(-size // length)
        for number in range(offset // length, -(-(offset + nbytes) // length)):
            start = number * length
            piece = FilePiece(name, number + 1, count, start, min(length, size - start))
            low, high = max(offset, start), min(offset + nbytes, start + piece.length)
            if low < high:
                yield piece, low, high

    def _open(self, piece: FilePiece) -> memoryview:
        """Return the bytes of a piece as far as they are there."""
        with self._lock:
            data = self._data.get(piece.key)
        if data is None:
            data = self._read(piece)
            with self._lock:
                data = self._data.setdefault(piece.key, data)
        return data

    def _read(self, piece: FilePiece) -> memoryview:
        data = new_piece(piece.length)
        if self._missing.get(piece.key, 0) < piece.length:
            with closing(open_file(self._room / piece.name)) as file:
                file.read_into(data, piece.start)
        return data

    def _send(self, piece: FilePiece) -> None:
        with self._lock:
            data = self._data.pop(piece.key, None)
            self.sent.add(piece.key)
        if data is None:
            data = self._read(piece)
        self._taker.put(piece, data, crc32(data))


@dataclass(frozen=True, slots=True)
class AssembledFiles:
    """The files in one directory of an output that is being put together, by their names in that."""

    assembly: Assembly
    place: str

    def __getitem__(self, name: str) -> AssembledFile:
        """Return a file, to write blocks to."""
        return AssembledFile(self.assembly, self.name(name))

    def note(self, name: str, offset: int, start: int, nbytes: int, crc: int) -> None:
        """Take note of what was written; see `Assembly.note`."""
        self.assembly.note(self.name(name), offset, start, nbytes, crc)

    def wants(self, name: str, offset: int, nbytes: int) -> bool:
        """Return whether some of these bytes are in pieces that are to be put."""
        pieces = self.assembly.pieces_in(self.name(name), offset, nbytes)
        return any(self.assembly.is_ours(piece) for piece, _, _ in pieces)

    def name(self, name: str) -> str:
        return f"{self.place}/{name}" if self.place else name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep open what is open: it is that of all threads, which an error ends."""
        if error is not None:
            self.assembly.stop(error)


@dataclass(frozen=True, slots=True)
class AssembledFile:
    """A file that is being put together."""

    assembly: Assembly
    name: str

    def write_at(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at byte `offset`."""
        self.assembly.write(self.name, buffer, offset)
