"""Read small runs of bytes of files in order, with few calls: each brings what follows it."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.errors import Corrupt
from ckptkit.files.file import OpenFiles

_WINDOW = 1 << 12  # bytes that a small read brings at least


class ReadAhead:
    """The bytes that the last read of `files` brought, out of which the next is answered if it can be."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._name = ""
        self._size = 0
        self._start = 0
        self._window = bytearray()

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `offset` of file `name`. Raises `Corrupt` if there are fewer."""
        window, at = self.hold(name, offset, length)
        return bytes(window[at : at + length])

    def hold(self, name: str, offset: int, length: int) -> tuple[bytearray, int]:
        """Return bytes of a file, and where among them those of `read` are. Raises `Corrupt` if there are fewer."""
        at = offset - self._start
        if name == self._name and 0 <= at <= len(self._window) - length:
            return self._window, at
        file = self._files[name]
        if name != self._name:
            self._name, self._size = name, file.size
        self._window = bytearray()  # nothing, if the read fails
        window = bytearray(max(length, min(_WINDOW, self._size - offset)))
        file.read_into(memoryview(window), offset)
        self._start, self._window = offset, window
        return window, 0

    def inside(self, name: str, start: int, length: int) -> Callable[[int, int], bytes]:
        """Return a function that reads in the `length` bytes from `start` of a file, and nowhere else."""

        def read(offset: int, count: int) -> bytes:
            if offset < 0 or count < 0 or offset + count > length:
                raise Corrupt(f"bytes {offset}:{offset + count} lie outside the item's {length}")
            return self.read(name, start + offset, count)

        return read
