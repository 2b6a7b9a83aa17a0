"""Force files to the disk while the rest of them is being written, so that little is left to wait for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.io.trees import sync_path

_ENOUGH = 1 << 26  # bytes that are worth a sync


@contextmanager
def early_sync(root: Path, *, sync: bool) -> Iterator[Callable[[str, int], None]]:
    """Give a function that is told, by one thread at a time, how many bytes were written to which file in `root`.

    Another thread forces these files to the disk meanwhile. That promises nothing yet: what is written last is left to
    the sync of all. Raises `IOFailure` at the end if it failed, since the next sync would not fail again. Without
    `sync` nothing is done.
    """
    written: set[str] = set()
    waiting = 0
    is_due, is_over = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def tell(path: str, nbytes: int) -> None:
        nonlocal waiting
        written.add(path)
        waiting += nbytes
        if waiting >= _ENOUGH:
            waiting = 0
            is_due.set()

    def run() -> None:
        while is_due.wait() and not is_over.is_set():
            is_due.clear()
            try:
                for _ in range(len(written)):
                    sync_path(root / written.pop())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                errors.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    if sync:
        with suppress(RuntimeError):  # the system has no more threads: all is left to the end
            thread.start()
    try:
        yield tell
    finally:
        is_over.set()
        is_due.set()
        if thread.is_alive():
            thread.join()
    if errors:
        raise errors[0]
