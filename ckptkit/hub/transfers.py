"""Transfers: files on their way to the Hub or from it, several at once. Whatever is sent twice is told of once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from ckptkit.progress import Progress, Told

Follow = Callable[[int], None]  # told of how far a file has come
Bars = Callable[[str], AbstractContextManager[Progress]]  # shows how far a stage of the work is, by what it is called


class Transfers:
    """What is on its way. The first error stops all of it."""

    def __init__(self, told: Told | None) -> None:
        self._told = told
        self._lock = Lock()
        self._reached: dict[str, int] = {}
        self._error: BaseException | None = None

    def reach(self, name: str, position: int) -> None:
        """Note how far file `name` has come. Raises `InterruptedError` if another one has failed."""
        with self._lock:
            if self._error is not None:
                raise InterruptedError("another transfer has failed")
            more = position - self._reached.get(name, 0)
            if more > 0:
                self._reached[name] = position
                if self._told:
                    self._told(more)

    @contextmanager
    def one(self, name: str, size: int) -> Iterator[None]:
        """Within, a file of `size` bytes is transferred. Of all files' errors only the first leaves this."""
        try:
            yield
            self.reach(name, size)
        except BaseException as error:
            with self._lock:
                is_first, self._error = self._error is None, self._error or error
            if is_first:
                raise


class FollowedReader(io.BufferedReader):
    """A file to read that tells how far that has come."""

    def __init__(self, path: Path, follow: Follow) -> None:
        super().__init__(io.FileIO(path))
        self._follow = follow

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file."""
        content = super().read(size)
        self._follow(self.tell())
        return content


class FollowedWriter(io.BufferedRandom):
    """A file to be written on from its end, that tells how far that has come."""

    def __init__(self, path: Path, follow: Follow) -> None:
        path.touch()
        super().__init__(io.FileIO(path, "r+"))
        self._follow = follow
        self.seek(0, io.SEEK_END)

    def write(self, content: Any, /) -> int:
        """As of any file."""
        written = super().write(content)
        self._follow(self.tell())
        return written


@contextmanager
def no_bar(_verb: str) -> Iterator[Progress]:
    """Where nobody watches."""
    yield lambda _nbytes, _total: None
