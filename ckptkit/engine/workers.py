"""Share work among threads: each takes the next unit when it has finished one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from ckptkit.io.path import REMOTE_JOBS, is_remote

Unit = TypeVar("Unit")
Step = Callable[[Unit], None]


def work(
    units: Iterable[Unit],
    worker: Callable[[], AbstractContextManager[Step[Unit]]],
    jobs: int | None,
    *sources: Path,
) -> None:
    """Let `jobs` threads, one of which is the caller's, do units in the step that `worker` gives each of them.

    Without a number there are as many as suit the `sources` that they read. The first error ends the work.
    """
    waiting = iter(units)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def take() -> Unit | None:
        with lock:
            return None if errors else next(waiting, None)

    def run() -> None:
        try:
            with worker() as step:
                while (unit := take()) is not None:
                    step(unit)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            errors.append(error)

    others = [threading.Thread(target=run, daemon=True) for _ in range((jobs or default_jobs(*sources)) - 1)]
    try:
        for thread in others:
            with suppress(RuntimeError):  # the system has no more threads: fewer do it
                thread.start()
        run()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C: the others finish their block first
        errors.append(error)
    for thread in others:
        if thread.is_alive():
            thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Exception))  # an interruption before all else


def default_jobs(*sources: Path) -> int:
    """Return how many threads to use by default: enough to keep a disk busy, no more than there are cores.

    Of those that read a remote source most are waiting.
    """
    if any(map(is_remote, sources)):
        return REMOTE_JOBS
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
