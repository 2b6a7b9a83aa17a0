"""Bring the pieces of files into the order of their bytes, for stores that take a file as one stream."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from ckptkit.io.pieces import PART_BYTES, FilePiece

ROOM = 8 * PART_BYTES
Write = Callable[[FilePiece, memoryview], None]


class Turns:
    """Files that several threads put piece by piece, each piece once. `write` gets the pieces of a file in order.

    Never are two pieces of one file written at the same time. Early pieces are held in memory, up to `room` bytes for
    all files together; a thread that brings another one then waits.

    There is no deadlock. A thread waits only for earlier pieces of its file, and if threads take their work in one
    order, which in every file is that of its bytes, then earlier pieces are earlier work, which others have taken. So
    the thread with the earliest work that is not done never waits, until `stop` ends the waiting of all.
    """

    def __init__(self, write: Write, room: int = ROOM) -> None:
        self._write = write
        self._room = room
        self._next: dict[str, int] = {}  # the number of the piece of a file that is written, or comes next
        self._early: dict[tuple[str, int], tuple[FilePiece, memoryview]] = {}
        self._held = 0  # bytes of early pieces
        self._error: BaseException | None = None
        self._changed = Condition()

    def put(self, piece: FilePiece, data: memoryview) -> None:
        """Write a piece now if it is its turn, and then those that waited for it; else keep it, and maybe wait.

        An error of `write` is raised to every thread that waits or comes later.
        """
        with self._changed:
            while not self._is_turn(piece) and self._held + len(data) > self._room and self._error is None:
                self._changed.wait()
            self._require_going()
            if not self._is_turn(piece):
                self._early[piece.key] = piece, data
                self._held += len(data)
                return
        following: tuple[FilePiece, memoryview] | None = (piece, data)
        while following is not None:
            try:
                self._write(*following)
            except BaseException as error:
                self.stop(error)
                raise
            following = self._go_on(following[0])

    def stop(self, error: BaseException) -> None:
        """Raise an error to every thread that waits or comes later, and forget the early pieces."""
        with self._changed:
            self._error = self._error or error
            self._early.clear()
            self._changed.notify_all()

    def _is_turn(self, piece: FilePiece) -> bool:
        return self._next.get(piece.name, 1) == piece.number

    def _go_on(self, written: FilePiece) -> tuple[FilePiece, memoryview] | None:
        """Let the piece behind a written one have its turn. Returns it if it is there already."""
        with self._changed:
            self._require_going()
            self._next[written.name] = written.number + 1
            following = self._early.pop((written.name, written.number + 1), None)
            if following is not None:
                self._held -= len(following[1])
            self._changed.notify_all()
        return following

    def _require_going(self) -> None:
        if self._error is not None:
            raise self._error
