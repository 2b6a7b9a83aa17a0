"""Cut files into pieces for copying, and remember which pieces an interrupted copy has written.

For a store that takes a file as one stream, `OrderedWriter` brings the pieces into the order of their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from threading import Condition, Lock
from typing import Protocol

from ckptkit.errors import translate_os_errors
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import open_file

PART_BYTES = 1 << 24  # minimum of a piece; all pieces except the last are equal, as some stores require
ROOM = 8 * PART_BYTES  # memory for pieces that wait for earlier ones
_MAX_PARTS = 9_000  # pieces per file; S3 accepts 10,000 parts
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A byte range of file `name` that is copied at once: piece `number` of `count`, counted from 1."""

    name: str
    number: int
    count: int
    start: int
    length: int

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.number


class PieceTaker(Protocol):
    """A receiver of file pieces, in any order and from several threads.

    Some receivers want the pieces of a file in order, so threads begin them in order, one after the other.
    """

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Write a piece, whose CRC-32 is `crc`. It may wait for earlier pieces, and keep `data`."""

    def stop(self, error: BaseException) -> None:
        """Raise an error that ended a thread in all threads that wait in `put`."""


class PieceSink(PieceTaker, Protocol):
    """A receiver that may already have some of the pieces."""

    def try_read_back(self, piece: FilePiece, data: memoryview) -> bool:
        """Fill `data` with the piece if the receiver already has it. Returns whether it has."""


@dataclass(slots=True)
class LocalPieces:
    """The existing, full-size files in directory `root`; the file `journal` lists the finished pieces."""

    root: Path
    journal: Path
    resumed_bytes: int = 0
    _done: dict[tuple[str, int], int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        with translate_os_errors(self.journal):
            lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        for line in lines:
            try:
                name, number, crc = json.loads(line)
            except ValueError:  # a line that was cut off by a crash
                continue
            self._done[name, number] = crc

    def try_read_back(self, piece: FilePiece, data: memoryview) -> bool:
        """Fill `data` from an interrupted copy, if it finished the piece and its checksum is still correct."""
        crc = self._done.get((piece.name, piece.number))
        if crc is None:
            return False
        with closing(open_file(self.root / piece.name)) as file:
            file.read_into(data, piece.start)
        is_whole = crc32(data) == crc
        with self._lock:
            self.resumed_bytes += len(data) if is_whole else 0
        return is_whole

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Write a piece, then record it in the journal."""
        with closing(open_file(self.root / piece.name, writable=True)) as file:
            file.write_at(data, piece.start)
        with self._lock, translate_os_errors(self.journal), self.journal.open("a") as journal:
            journal.write(json.dumps([piece.name, piece.number, crc]) + "\n")

    def stop(self, error: BaseException) -> None:
        """Do nothing: no piece waits for another."""


def new_piece_buffer(nbytes: int) -> memoryview:
    """Return zeroed memory of `nbytes` bytes, which goes back to the system as soon as nothing refers to it.

    The C library's `free` would keep up to 32 MiB for each thread that allocates memory of this size.
    """
    return memoryview(mmap(-1, max(nbytes, 1), flags=MAP_PRIVATE | MAP_ANONYMOUS))[:nbytes]


def is_sent_in_pieces(nbytes: int) -> bool:
    return nbytes > PART_BYTES


def piece_size_for(size: int) -> int:
    """Return the bytes per piece of a file of `size` bytes; only the last piece may be smaller."""
    return max(PART_BYTES, -(-size // (_MAX_PARTS * _MIB)) * _MIB)


def cut_into_pieces(name: str, size: int) -> Iterator[FilePiece]:
    """Yield the pieces of a file of `size` bytes; a small or empty file is a single piece."""
    length = piece_size_for(size)
    starts = range(0, max(size, 1), length)
    for number, start in enumerate(starts, 1):
        yield FilePiece(name, number, len(starts), start, min(length, size - start))


class OrderedWriter:
    """Brings pieces that several threads put in any order, each once, into the order of each file for `write`.

    Two pieces of one file are never written at the same time. Early pieces stay in memory, up to `room` bytes for all
    files together; then a thread with another early piece waits.

    There is no deadlock. A thread only waits for earlier pieces of its file. If threads take work in an order that is
    the byte order within every file, other threads have already taken all earlier pieces. So the thread with the
    earliest unfinished work never waits, until `stop` wakes all threads.
    """

    def __init__(self, write: Callable[[FilePiece, memoryview], None], room: int = ROOM) -> None:
        self._write = write
        self._room = room
        self._next: dict[str, int] = {}  # number of the piece that is being written, or is next, by file
        self._early: dict[tuple[str, int], tuple[FilePiece, memoryview]] = {}
        self._held = 0  # bytes of early pieces
        self._error: BaseException | None = None
        self._changed = Condition()

    def put(self, piece: FilePiece, data: memoryview) -> None:
        """Write a piece if it is next, and the early pieces that follow it; else keep it, waiting if memory is full.

        An error of `write` is raised in every thread that waits or comes later.
        """
        with self._changed:
            while not self._is_next(piece) and self._held + len(data) > self._room and self._error is None:
                self._changed.wait()
            self._require_no_error()
            if not self._is_next(piece):
                self._early[piece.key] = piece, data
                self._held += len(data)
                return
        # write outside the lock, so that other threads can add early pieces meanwhile
        following: tuple[FilePiece, memoryview] | None = (piece, data)
        while following is not None:
            try:
                self._write(*following)
            except BaseException as error:
                self.stop(error)
                raise
            # the piece after the written one is next, and may have arrived already
            with self._changed:
                self._require_no_error()
                number = self._next[piece.name] = following[0].number + 1
                following = self._early.pop((piece.name, number), None)
                if following is not None:
                    self._held -= len(following[1])
                self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Raise an error in every thread that waits or comes later, and drop the early pieces."""
        with self._changed:
            self._error = self._error or error
            self._early.clear()
            self._changed.notify_all()

    def _is_next(self, piece: FilePiece) -> bool:
        return self._next.get(piece.name, 1) == piece.number

    def _require_no_error(self) -> None:
        if self._error is not None:
            raise self._error
