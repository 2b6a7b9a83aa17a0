"""Assemble files piece by piece, from data that arrives in blocks in any order.

A directory contains all bytes that are known beforehand. A piece goes to its taker, and its memory is freed, when the
block with its last missing byte is complete. If blocks arrive nearly in order, few pieces are open at a time. A thread
finishes its block before it sends pieces, so no piece waits for a thread that is busy sending. Pieces that need no data
are sent directly before the next piece that does, so no taker waits for them. The CRC-32 of data, which some formats
record behind it, is filled in when the data is complete.
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
from ckptkit.io.pieces import FilePiece, PieceTaker, cut_into_pieces, new_piece_buffer, piece_size_for

PieceKey = tuple[str, int]  # (file name, piece number)


@dataclass(slots=True)
class PendingBytes:
    """Data of `nbytes` that has not arrived yet, and the offsets in the same file of its CRC-32, 4 bytes each."""

    nbytes: int
    crc_offsets: list[int] = field(default_factory=list)


class OwnPieces(threading.local):
    """The pieces that the current thread has completed and not sent yet."""

    def __init__(self) -> None:
        self.whole: list[FilePiece] = []


class Assembly:
    """Files of these `sizes` in bytes.

    Directory `room` has everything except the gaps; `taker` gets each complete piece. The keys of `gaps` are a file's
    name and an offset. With `only`, other processes write all other pieces. Several threads may write at the same time.
    `sent` are the pieces that the taker has received.
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
            for start, nbytes in ((offset, gap.nbytes), *((at, 4) for at in gap.crc_offsets)):
                for piece, low, high in self.pieces_in(name, start, nbytes):
                    self._missing[piece.key] = self._missing.get(piece.key, 0) + high - low

    def directory_writer(self, directory: str) -> AssembledFiles:
        """Return the writable files in a directory of the output, "" for the output itself."""
        return AssembledFiles(self, directory)

    def write_bytes(self, name: str, data: memoryview, offset: int) -> None:
        """Write bytes that belong in gaps. No byte may be written twice.

        `record_written` sends the pieces that this completes.
        """
        for piece, low, high in self.pieces_in(name, offset, len(data)):
            if not self.should_send_piece(piece):
                continue
            # the buffer of a piece has the bytes that have arrived so far
            with self._lock:
                whole = self._data.get(piece.key)
            if whole is None:
                fresh = self._read_piece(piece)
                with self._lock:
                    whole = self._data.setdefault(piece.key, fresh)
            whole[low - piece.start : high - piece.start] = data[low - offset : high - offset]
            with self._lock:
                self._missing[piece.key] -= high - low
                is_whole = not self._missing[piece.key]
            if is_whole:
                self._own.whole += [*self._dataless_pieces_before(piece), piece]

    def record_written(self, name: str, gap_offset: int, start_in_gap: int, nbytes: int, crc: int) -> None:
        """Record that `nbytes` from `start_in_gap` of the gap at `gap_offset` were written, with this CRC-32.

        Sends the pieces that this thread has completed, in the order of the file.
        """
        gap_key = name, gap_offset
        with self._lock:
            self._sums.add(gap_key, start_in_gap, nbytes, crc)
            gap = self._gaps.get(gap_key)
            total = None if gap is None else self._sums.find_complete_crc(gap_key, gap.nbytes)
            if total is not None:
                del self._gaps[gap_key]
        if gap is not None and total is not None:
            for at in gap.crc_offsets:
                self.write_bytes(name, memoryview(total.to_bytes(4, "little")), at)
        whole, self._own.whole = self._own.whole, []
        for piece in sorted(whole, key=attrgetter("start")):
            self._send_piece(piece)

    def send_remaining(self) -> None:
        """Send the remaining pieces that needed no data: no piece with data follows them.

        Raises `Corrupt` if a piece still lacks data then.
        """
        missing: list[FilePiece] = []
        for name, size in self._sizes.items():
            for piece in cut_into_pieces(name, size):
                if not self.should_send_piece(piece) or piece.key in self.sent:
                    continue
                if self._missing.get(piece.key):
                    missing.append(piece)
                else:
                    self._send_piece(piece)
        if missing:
            piece = missing[0]
            message = f"{self._missing[piece.key]} bytes of piece {piece.number} of {piece.count} were not written"
            raise Corrupt(message, path=self._room / piece.name, offset=piece.start)

    def stop(self, error: BaseException) -> None:
        self._taker.stop(error)

    def _dataless_pieces_before(self, piece: FilePiece) -> list[FilePiece]:
        """Return our pieces between this one and the last one before it that needs data."""
        pieces: list[FilePiece] = []
        for number in range(piece.number - 1, 0, -1):
            if (piece.name, number) in self._missing:
                break
            start = (number - 1) * piece_size_for(self._sizes[piece.name])
            pieces.append(FilePiece(piece.name, number, piece.count, start, piece_size_for(self._sizes[piece.name])))
        return [known for known in reversed(pieces) if self.should_send_piece(known)]

    def should_send_piece(self, piece: FilePiece) -> bool:
        return self._only is None or piece.key in self._only

    def pieces_in(self, name: str, offset: int, nbytes: int) -> Iterator[tuple[FilePiece, int, int]]:
        """Yield the pieces of a file that contain some of these bytes, with the start and end offset in the file."""
        size = self._sizes[name]
        length = piece_size_for(size)
        count = -(-size // length)
        for number in range(offset // length, -(-(offset + nbytes) // length)):
            start = number * length
            piece = FilePiece(name, number + 1, count, start, min(length, size - start))
            low, high = max(offset, start), min(offset + nbytes, start + piece.length)
            if low < high:
                yield piece, low, high

    def _read_piece(self, piece: FilePiece) -> memoryview:
        data = new_piece_buffer(piece.length)
        if self._missing.get(piece.key, 0) < piece.length:
            with closing(open_file(self._room / piece.name)) as file:
                file.read_into(data, piece.start)
        return data

    def _send_piece(self, piece: FilePiece) -> None:
        with self._lock:
            data = self._data.pop(piece.key, None)
            self.sent.add(piece.key)
        if data is None:
            data = self._read_piece(piece)
        self._taker.put(piece, data, crc32(data))


@dataclass(frozen=True, slots=True)
class AssembledFiles:
    """The files in one directory of an output that is being assembled, by their names in that directory."""

    assembly: Assembly
    place: str

    def __getitem__(self, name: str) -> AssembledFile:
        return AssembledFile(self.assembly, self.name_in_output(name))

    def record_written(self, name: str, gap_offset: int, start_in_gap: int, nbytes: int, crc: int) -> None:
        self.assembly.record_written(self.name_in_output(name), gap_offset, start_in_gap, nbytes, crc)

    def should_send_any_byte(self, name: str, offset: int, nbytes: int) -> bool:
        """Return whether any of these bytes are in pieces that this process sends."""
        pieces = self.assembly.pieces_in(self.name_in_output(name), offset, nbytes)
        return any(self.assembly.should_send_piece(piece) for piece, _, _ in pieces)

    def name_in_output(self, name: str) -> str:
        return f"{self.place}/{name}" if self.place else name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the files open, because all threads share them; an error stops all threads."""
        if error is not None:
            self.assembly.stop(error)


@dataclass(frozen=True, slots=True)
class AssembledFile:
    """A file that is being assembled."""

    assembly: Assembly
    name: str

    def write_at(self, buffer: memoryview, offset: int) -> None:
        self.assembly.write_bytes(self.name, buffer, offset)
