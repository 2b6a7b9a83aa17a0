"""Send a file to a destination while its bytes are made, in bounded memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ckptkit.io.crc32 import combine, crc32
from ckptkit.io.destination import Destination
from ckptkit.io.pieces import FilePiece, cut_file, new_piece

SENDERS = 4  # threads of a file


class FileStream:
    """A file of `nbytes` bytes on its way to a destination: written from start to end, and sent by several threads.

    To be used as a context manager: an error of a thread is raised by `write` or at the end of the block, where the
    file is complete in the destination. One piece is filled while `SENDERS` others are sent.
    """

    def __init__(self, there: Destination, name: str, nbytes: int) -> None:
        self.crc = 0  # of all that was sent
        self._there = there
        self._name = name
        self._pieces = cut_file(name, nbytes)
        self._piece = next(self._pieces)
        self._data = new_piece(self._piece.length)
        self._filled = 0
        self._threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="ckptkit-send")
        self._sending: deque[tuple[int, Future[int]]] = deque()  # how many bytes, and the CRC-32 to come

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes, which are copied. Raises `ValueError` for more than the file has."""
        view = memoryview(data)
        while view:
            length = min(len(view), self._piece.length - self._filled)
            if not length:
                raise ValueError(f"{self._name}: more bytes than were planned")
            self._data[self._filled : self._filled + length] = view[:length]
            self._filled += length
            view = view[length:]
            if self._filled == self._piece.length:
                self._send()

    def _send(self) -> None:
        while len(self._sending) >= SENDERS:
            self._wait()
        self._sending.append((self._filled, self._threads.submit(self._put, self._piece, self._data)))
        following = next(self._pieces, None)
        if following is not None:
            self._piece = following
            self._data = new_piece(following.length)
            self._filled = 0

    def _put(self, piece: FilePiece, data: memoryview) -> int:
        crc = crc32(data)
        self._there.put(piece, data, crc)
        return crc

    def _wait(self) -> None:
        """Wait for the oldest piece that is being sent."""
        length, sent = self._sending.popleft()
        self.crc = combine(self.crc, sent.result(), length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is not None:
                self._there.stop(error)
            else:
                if self._filled < self._piece.length:
                    raise ValueError(f"{self._name}: fewer bytes than were planned")
                while self._sending:
                    self._wait()
                self._there.complete(self._name, self.crc)
        finally:
            self._threads.shutdown(cancel_futures=True)
