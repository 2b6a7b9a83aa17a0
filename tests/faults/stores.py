"""The cases of writing to a store: a fault at one request after the other, and what readers make of what stands there.

A writing is right if it ends well and what it wrote is whole, or if it was killed. After every fault the checkpoint is
absent or whole, the same command completes it, and what the store has is not sent again. `lost` is what was sent twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.cases import Case, Seen
from tests.faults.points import spread
from tests.faults.server import Ended
from tests.faults.store_scenes import Place, StoreScene, stage
from tests.faults.store_writings import COMMANDS, PARTS, PEERS, SAVES
from tests.faults.verdicts import Verdict, judge_error
from tests.s3 import Fault

_DELAY = 0.3  # seconds
_FOREVER = 1 << 30
_FEW = 5  # requests after which a command is killed in the fast share
_OVER = (COMMANDS[0], SAVES[0], *PEERS)  # that are tried over an old checkpoint too


@dataclass(frozen=True, slots=True)
class StoreTrouble:
    """A kind of fault of a store; it may kill the writing, or be harmless: then everything must be right."""

    name: str
    make: Callable[[int, Callable[[], None]], Fault]  # of the requests to skip, and what kills the writing
    kills: bool = False
    is_harmless: bool = False


def dropped(skip: int, _: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, dropped=True)


def dropped_forever(skip: int, _: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, dropped=True, times=_FOREVER)


def cut(skip: int, _: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, cut=True)


def lost(skip: int, _: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, lost=True)


def delayed(skip: int, _: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, first=partial(time.sleep, _DELAY))


def refused(status: int, code: str, times: int = 1) -> Callable[[int, Callable[[], None]], Fault]:
    """Return what makes a fault of an answer with a status and a code."""
    return lambda skip, _: Fault(".", skip=skip, status=status, code=code, times=times)


def killed_before(skip: int, kill: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, first=kill, dropped=True)


def killed_after(skip: int, kill: Callable[[], None]) -> Fault:
    return Fault(".", skip=skip, last=kill, lost=True)


TROUBLES = (
    StoreTrouble("the connection is dropped", dropped, is_harmless=True),
    StoreTrouble("the connection breaks in the middle of a request or response", cut, is_harmless=True),
    StoreTrouble("the store does the request, the response is lost", lost, is_harmless=True),
    StoreTrouble("the response takes 0.3 s", delayed, is_harmless=True),
    StoreTrouble("503 SlowDown", refused(503, "SlowDown"), is_harmless=True),
    StoreTrouble("503 SlowDown for every later request", refused(503, "SlowDown", _FOREVER)),
    StoreTrouble("no connection for any later request", dropped_forever),
    StoreTrouble("403 ExpiredToken for every later request", refused(403, "ExpiredToken", _FOREVER)),
    StoreTrouble("409 ConditionalRequestConflict", refused(409, "ConditionalRequestConflict")),
    StoreTrouble("412 PreconditionFailed", refused(412, "PreconditionFailed")),
    StoreTrouble("kill -9 before the request", killed_before, kills=True),
    StoreTrouble("kill -9 after the request", killed_after, kills=True),
)


def try_requests(scene: StoreScene, trouble: StoreTrouble, chosen: Sequence[int] | None) -> Iterator[Seen]:
    """Let a trouble come to every request of a writing, or to those `chosen`, counted from 1."""
    _ = scene.truths
    total = scene.requests
    for at in chosen or range(1, total + 1):
        with scene.lay() as place:
            verdict, what = try_request(place, trouble, at - 1)
        where = f"{scene.name}, {trouble.name} at request {at} of {total}"
        yield Seen(scene.writing.subject, verdict, f"{where}, {what}")


def try_request(place: Place, trouble: StoreTrouble, skip: int) -> tuple[Verdict, str]:
    """Let a fault come to a request, and then do the same writing again with none."""
    fault = trouble.make(skip, place.kill)
    times = fault.times
    ended = place.run(fault)
    if fault.times == times:
        return Verdict.UNFIRED, "never"
    where = place.asked[skip].what.replace(f"/{place.bucket}", "")
    sent, stands, left = place.sent(), place.stands(), place.leavings()
    what = f"{where}: code {ended.code}, {stands}, left {left}: {ended.err.strip()[-300:]}"
    verdict = judge(place, trouble, ended, stands)
    is_done = ended.code == 0 and not left
    if not place.scene.writing.is_ours or is_done or verdict not in (Verdict.RIGHT, Verdict.CLEAN):
        return verdict, what
    again, seen_again = judge_again(place, sent, was_whole=stands == "new" and not left)
    return (verdict if again is Verdict.RIGHT else again), f"{what}; {seen_again}"


def judge(place: Place, trouble: StoreTrouble, ended: Ended, stands: str) -> Verdict:
    """What became of a writing that a trouble came to, while `stands` is there."""
    if stands not in ("absent", "old", "new"):
        return Verdict.HALF if stands == "half" else Verdict.SILENT
    if ended.code == 0:
        return Verdict.RIGHT if stands == "new" else Verdict.SILENT
    if trouble.kills and ended.code is not None and ended.code < 0:
        return Verdict.RIGHT
    verdict = judge_error(ended, [place.bucket])
    return Verdict.UNNAMED if trouble.is_harmless and verdict is Verdict.CLEAN else verdict


def judge_again(place: Place, sent: dict[str, int], *, was_whole: bool) -> tuple[Verdict, str]:
    """What becomes of the same writing when nothing comes to it any more.

    `sent` are the pieces that the store has taken of the first one. What `was_whole` may be refused.
    """
    scene = place.scene
    ended = place.run(is_again=True)
    stands, left, more = place.stands(), place.leavings(), place.sent()
    seen = f"run again: code {ended.code}, {stands}, left {left}, sent {sum(more.values())}: {ended.err.strip()[-300:]}"
    if stands == "new" and not left and was_whole and "the destination exists" in ended.err:
        return Verdict.RIGHT, seen
    if ended.code != 0:
        return judge_error(ended, [place.bucket]), seen
    if stands != "new" or left or scene.new.keys() != place.objects().keys():
        return Verdict.SILENT if stands != "new" else Verdict.HALF, seen
    twice = {name for name in more if name in sent}
    if scene.writing.resumes and not scene.is_over and twice:
        return Verdict.LOST, f"{seen}, twice: {twice}"
    return Verdict.RIGHT, seen


def try_all(trouble: StoreTrouble, _: Path, whole: bool) -> Iterator[Seen]:
    """Let a trouble come to every request of every writing."""
    if not whole:
        yield from try_some(trouble)
        return
    for writing in (*COMMANDS, PARTS, *SAVES, *PEERS):
        for is_over in (False, True) if writing in _OVER else (False,):
            yield from try_requests(StoreScene(writing, is_over, stage()), trouble, None)


def try_some(trouble: StoreTrouble) -> Iterator[Seen]:
    """Kill a command after some requests, or let another trouble come to one request: to each kind a later one."""
    scene = StoreScene(COMMANDS[0], False, stage())
    if trouble.make is killed_after:
        yield from try_requests(scene, trouble, spread(scene.requests, _FEW))
        return
    at = 1 + 7 * TROUBLES.index(trouble) % scene.requests
    yield from try_requests(scene, trouble, [at])


CASES = tuple(Case("63", "store", trouble.name, partial(try_all, trouble)) for trouble in TROUBLES)
