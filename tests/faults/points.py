"""Points: a fault at one call after the other of a writing, and what comes of each. Chooses no faults."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.faults.cases import Seen
from tests.faults.scenes import Scene
from tests.faults.server import Ended
from tests.faults.shim import CALLS, Fault
from tests.faults.verdicts import Verdict

LOOKING = ("stat", "list")  # calls that change nothing, and of which there are most
CHANGING = tuple(call for call in CALLS if call not in LOOKING)
CLEARING = ("unlink", "rmdir", "lock", *LOOKING)  # after an error of these something hidden may be left


@dataclass(frozen=True, slots=True)
class Trouble:
    """A kind of fault at some of the `calls`: `crashes` the process, or `has_no_effect`, so that all must be right."""

    name: str
    kind: str
    number: int = 0
    calls: tuple[str, ...] = CALLS
    forever: bool = False
    crashes: bool = False
    is_harmless: bool = False


def try_points(scene: Scene, trouble: Trouble, most: int | None) -> Iterator[Seen]:
    """Let a trouble come to every call of a writing, or to at most `most` of them, spread evenly."""
    scene.lay()
    fault = Fault(str(scene.root), kind=trouble.kind, number=trouble.number, calls=trouble.calls)
    total = scene.run(replace(fault, kind="nothing", forever=True)).fired
    for at in spread(total, most):
        verdict, what = try_point(scene, trouble, replace(fault, at=at, forever=trouble.forever))
        yield Seen(scene.writing.subject, verdict, f"{scene.name}, {trouble.name} at call {at} of {total}, {what}")


def try_point(scene: Scene, trouble: Trouble, fault: Fault) -> tuple[Verdict, str]:
    """Let a fault come to a writing, and then write again with none."""
    scene.lay()
    ended = scene.run(fault)
    where = ended.where.replace(f"{scene.root}/", "")
    if not ended.fired:
        return Verdict.UNFIRED, "never"
    verdict, seen = judge(scene, trouble, ended)
    if scene.writing.is_ours and verdict in (Verdict.RIGHT, Verdict.CLEAN) and (trouble.crashes or scene.leavings()):
        again, seen_again = scene.judge_again()
        if again is not Verdict.RIGHT:
            return again, f"{where}: {seen}; {seen_again}"
    return verdict, f"{where}: {seen}"


def judge(scene: Scene, trouble: Trouble, ended: Ended) -> tuple[Verdict, str]:
    """What became of a writing that a trouble came to."""
    verdict, seen = scene.judge(ended, crashed=trouble.crashes)
    if trouble.crashes and ("Traceback" in ended.err or ended.code not in (0, -trouble.number, 128 + trouble.number)):
        return Verdict.TRACEBACK, seen
    if trouble.is_harmless and verdict is Verdict.CLEAN:
        return Verdict.UNNAMED, f"an error for nothing: {seen}"
    is_excused = trouble.crashes or trouble.forever or ended.where.split(" ")[0] in CLEARING
    if scene.writing.is_ours and scene.leavings() and scene.stands() == "old" and not is_excused:
        return Verdict.HALF, f"left behind: {seen}"
    return verdict, seen


def try_doubles(scene: Scene, most: int | None) -> Iterator[Seen]:
    """Kill a writing, kill the one that goes on with it or clears it away, and write again with nothing in the way."""
    fault = Fault(str(scene.root), kind="signal", number=9, calls=CHANGING)
    scene.lay()
    total = scene.run(replace(fault, kind="nothing", forever=True)).fired
    for first in spread(total, most)[1:-1]:
        for second in spread(total, most):
            scene.lay()
            scene.run(replace(fault, at=first))
            what = f"{scene.name}, killed at call {first} of {total} and then at call {second}"
            if not scene.run(replace(fault, at=second)).fired:
                yield Seen(scene.writing.subject, Verdict.UNFIRED, what)
                continue
            if scene.stands() == "neither":
                yield Seen(scene.writing.subject, Verdict.LOST if scene.is_over else Verdict.HALF, what)
                continue
            verdict, seen = scene.judge_again()
            yield Seen(scene.writing.subject, verdict, f"{what}, {seen}")


def spread(total: int, most: int | None) -> Sequence[int]:
    """The numbers from 1 to `total`, or `most` of them; of one only, the last."""
    if most is None or total <= most:
        return range(1, total + 1)
    steps = max(1, most - 1)
    return sorted({total - i * (total - 1) // steps for i in range(most)})


FULL = tuple(call for call in CHANGING if call not in ("read", "lock", "unlink", "rmdir"))
NOT_ENOUGH = (
    Trouble("ENOSPC", "error", errno.ENOSPC, FULL),
    Trouble("ENOSPC from there on", "error", errno.ENOSPC, FULL, forever=True),
)
QUOTA = (Trouble("EDQUOT", "error", errno.EDQUOT, FULL),)
BROKEN = (Trouble("EIO", "error", errno.EIO), Trouble("EIO from there on", "error", errno.EIO, forever=True))
# POSIX knows no interruption of those that look, and Python makes none of them again
INTERRUPTED = (Trouble("EINTR", "error", errno.EINTR, CHANGING, is_harmless=True),)
SHORT = (Trouble("half of it", "short", 0, ("read", "write"), is_harmless=True),)
_NAMING = ("open", "rename", "exchange", "link", "mkdir", "unlink", "sync", "syncdir", *LOOKING)
GONE = tuple(Trouble(errno.errorcode[code], "error", code, _NAMING) for code in (errno.EROFS, errno.ESTALE))
LACKING = tuple(
    Trouble(f"{errno.errorcode[code]} for every {call}", "error", code, (call,), forever=True, is_harmless=True)
    for code in (errno.ENOTSUP, errno.ENOSYS)
    for call in ("allocate", "lock", "exchange", "syncdir")
)
KILLED = (
    Trouble("kill -9 before", "signal", 9, CHANGING, crashes=True),
    Trouble("kill -9 within", "torn", 9, CHANGING, crashes=True),
)
STOPPED = tuple(
    Trouble(f"{number.name} before", "signal", number, CHANGING, crashes=True)
    for number in (signal.SIGINT, signal.SIGTERM)
)
