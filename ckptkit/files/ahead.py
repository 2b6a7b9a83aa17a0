"""Read small runs of bytes of files in order, with few calls: each brings what follows it."""

from __future__ import annotations

from ckptkit.files.file import Opened, read_at

_WINDOW = 1 << 12  # bytes that a small read brings at least


class ReadAhead:
    """The bytes that the last read of `files` brought, out of which the next is answered if it can be."""

    def __init__(self, files: Opened) -> None:
        self._files = files
        self._name = ""
        self._size = 0
        self._start = 0
        self._window = b""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `offset` of file `name`. Raises `Corrupt` if there are fewer."""
        at = offset - self._start
        if name != self._name or not 0 <= at <= len(self._window) - length:
            self._bring(name, offset, length)
            at = 0
        return self._window[at : at + length]

    def _bring(self, name: str, offset: int, length: int) -> None:
        """Read at least `length` bytes of a file, and as many more as are worth no call of their own."""
        file = self._files[name]
        if name != self._name:
            self._name, self._size, self._window = name, file.size, b""
        self._window = read_at(file, max(length, min(_WINDOW, self._size - offset)), offset)
        self._start = offset
