"""Limits: a writing under less than it needs of what the system gives each process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.faults.cases import Seen
from tests.faults.points import spread
from tests.faults.scenes import Scene
from tests.faults.verdicts import Verdict, judge_error

FILE_SIZES = (0, 1, 100, 1000, 10_000, 50_000, 100_000, 1 << 17)  # bytes, up to what is nearly enough
OPEN_FILES = tuple(range(5, 24))
MEMORY = tuple(range(0, 65, 4))  # MiB beyond what the server has


def try_limit(scene: Scene, limit: int, values: tuple[int, ...], most: int | None) -> Iterator[Seen]:
    """Write under each of the limits, or at most `most`; a limit that is no hindrance is none."""
    for i in spread(len(values), most):
        value = values[i - 1]
        scene.lay()
        ended = scene.run(limits={limit: value})
        verdict, seen = scene.judge(ended)
        if ended.code and "not enough memory" in ended.err:
            verdict = judge_error(ended, ())
        if verdict in (Verdict.RIGHT, Verdict.CLEAN) and scene.writing.is_ours:
            again, seen_again = scene.judge_again()
            verdict, seen = (verdict, seen) if again is Verdict.RIGHT else (again, f"{seen}; {seen_again}")
        yield Seen(scene.writing.subject, verdict, f"{scene.name}, limit {limit} of {value}: {seen}")


def try_memory(scene: Scene, most: int | None) -> Iterator[Seen]:
    """Write with less and less memory."""
    answer = scene.server.run("tests.faults.limits:tell_memory", [])
    taken = int(answer.out)
    values = tuple(taken + (more << 20) for more in MEMORY)
    yield from try_limit(scene, resource.RLIMIT_AS, values, most)


def tell_memory() -> None:
    """Say how much address space this process has, in bytes."""
    sys.stdout.write(str(int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()))
