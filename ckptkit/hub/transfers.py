"""Work on files of the Hub, several at once, and tell how far it is. Bytes that are sent twice count once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock

from ckptkit.engine.workers import Step, work
from ckptkit.io.progress import Progress, Told

Follow = Callable[[int], None]  # told of the position in a file that was reached
Bars = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of a stage of the work, by its name


class Transfers:
    """Files that are worked on. The first error stops all of it."""

    def __init__(self, told: Told | None) -> None:
        self._told = told
        self._lock = Lock()
        self._reached: dict[str, int] = {}
        self._error: BaseException | None = None

    def reach(self, name: str, position: int) -> None:
        """Note the position reached in file `name`. Raises `InterruptedError` if the work on another has failed."""
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
        """Work on a file of `size` bytes inside the block. Of all files' errors only the first leaves it."""
        try:
            yield
            self.reach(name, size)
        except BaseException as error:
            with self._lock:
                is_first, self._error = self._error is None, self._error or error
            if is_first:
                raise


def for_each(
    sizes: Mapping[str, int], do: Callable[[str, Follow], None], jobs: int | None, told: Told | None = None
) -> None:
    """Call `do` for each file of these sizes in bytes, with `jobs` threads; its second argument is told positions."""
    transfers = Transfers(told)

    @contextmanager
    def working() -> Iterator[Step[str]]:
        def step(name: str) -> None:
            with transfers.one(name, sizes[name]):
                do(name, partial(transfers.reach, name))

        yield step

    work(sizes, working, jobs)


class FollowedReader(io.BufferedReader):
    """A file to read that tells the position reached."""

    def __init__(self, path: Path, follow: Follow) -> None:
        super().__init__(io.FileIO(path))
        self._follow = follow

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as any file does."""
        content = super().read(size)
        self._follow(self.tell())
        return content


@contextmanager
def no_bar(_verb: str) -> Iterator[Progress]:
    """Show nothing."""
    yield lambda _nbytes, _total: None
