"""Keep processes that try one type of models after another."""

from __future__ import annotations

import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scripts.sweeping.result import FAILED, Result

RANKS = 3

get_context("forkserver").set_forkserver_preload(["scripts.sweeping.ranks"])


class Team:
    """Three processes of one gloo group that try one type after another, and are replaced when one is lost."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._processes: list[Any] = []

    def attempt(self, model_type: str) -> Result:
        """Return what came of a type; it fails if that takes longer than the limit, in seconds."""
        if not self._processes:
            self._start()
        result = self._ask(model_type)
        if result.outcome == FAILED:  # perhaps in the middle of what the ranks do together
            self.end()
        return result

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._processes:
            self._first.close()
            self._home.cleanup()
        self._processes = []

    def _start(self) -> None:
        from scripts.sweeping.ranks import serve  # which needs transformers

        self._home = tempfile.TemporaryDirectory(prefix="sweep-")
        self._first, theirs = get_context("forkserver").Pipe()
        for rank in range(RANKS):
            arguments = (rank, RANKS, Path(self._home.name), theirs if rank == 0 else None)
            self._processes.append(get_context("forkserver").Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
        theirs.close()

    def _ask(self, model_type: str) -> Result:
        try:
            self._first.send(model_type)
            if not self._first.poll(self._limit):
                return Result(FAILED, f"it takes longer than {self._limit:g} s")
            result: Result = self._first.recv()
        except (EOFError, OSError):
            return Result(FAILED, "its process ended")
        return result
