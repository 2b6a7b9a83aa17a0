"""Trials: one subject on one input, and what it made of that."""

from __future__ import annotations

import atexit
import json
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults.cases import Case, Seen
from tests.faults.digests import digest
from tests.faults.originals import Original, original
from tests.faults.server import Ended, Server
from tests.faults.subjects import CONSOLIDATE, CONVERT, INSPECT, OURS, PEERS, RESHARD, VERIFY, Subject, are_equal
from tests.faults.verdicts import Verdict, is_warned_of, judge_error
from tests.verbs import FORMAT_MODULES, modules_of

_OURS = (
    *modules_of("inspect", "verify", "consolidate", "reshard", "convert", "average", "merge"),
    *FORMAT_MODULES,
)
_THEIRS = ("tests.faults.peers", "tests.faults.originals")
_IN_TURN = ((CONSOLIDATE,), (CONVERT, VERIFY), (RESHARD,), (INSPECT,))  # of the fast share, one for each input
_FEW = 6  # inputs of a case in the fast share, about
_ROOM = 16 << 30  # bytes of address space, lest the machine suffer


@dataclass(frozen=True, slots=True)
class Bad:
    """An input: a sound checkpoint, and what is done to a copy of it. An error has to name one of `culprits`.

    Whatever comes out must be the `truth`: that of the original, if it is None. Of what is `refused` nothing may. A
    subject may take so many `seconds`, and `memory` bytes more than it had. Not all need be tried on all `subjects`. Of
    what `is_sound`, only strange, `verify` may say so, though a format may not be able to hold it.
    """

    name: str
    original: str
    damage: Callable[[Path], object]
    culprits: tuple[str, ...] = ()
    refused: bool = False
    truth: Mapping[str, Any] | None = None
    seconds: float = 20.0
    memory: int = 1 << 30
    is_sound: bool = False
    subjects: tuple[Subject, ...] = (*OURS, *PEERS)


def canary_of(src: Path) -> Path:
    """Where code in the checkpoint at `src` leaves a trace, if it is ever run."""
    return src.parent / "canary"


def case(numbers: str, group: str, name: str, bads: Sequence[Bad]) -> Case:
    """The case of some bad inputs, each tried on every subject that takes it.

    In the fast share some of ours are tried on some of the inputs.
    """
    return case_of(numbers, group, name, lambda: bads)


def case_of(numbers: str, group: str, name: str, make: Callable[[], Iterable[Bad]]) -> Case:
    """The case of inputs that are known only when it is run."""

    def run(place: Path, whole: bool) -> Iterator[Seen]:
        bads = list(make())
        for i, bad in enumerate(bads if whole else some_of(bads, name)):
            tried = bad.subjects if whole or bad.subjects[0] not in OURS else _IN_TURN[i % len(_IN_TURN)]
            fit = [subject for subject in tried if subject in bad.subjects and takes(subject, bad.original)]
            yield from try_all(bad, fit, place / str(i))

    return Case(numbers, group, name, run)


def some_of(bads: Sequence[Bad], name: str) -> Sequence[Bad]:
    """The fast share of the inputs of case `name`; of other cases it begins elsewhere, so that each kind has a turn."""
    step = 1 + len(bads) // _FEW
    return bads[len(name) % step :: step]


def takes(subject: Subject, name: str) -> bool:
    """True if the subject reads what the original is."""
    return name.partition("-")[0] in subject.takes


def try_all(bad: Bad, subjects: Iterable[Subject], place: Path) -> Iterator[Seen]:
    """What the subjects make of an input."""
    sound = original(bad.original)
    src = place / "in" / "checkpoint"
    src.parent.mkdir(parents=True)
    shutil.copytree(sound.root, src)
    bad.damage(src)
    verdicts: dict[str, Verdict] = {}
    for subject in subjects:
        verdict = attempt(subject, bad, sound, src, place / "out")
        if subject is VERIFY and verdict is Verdict.RIGHT and not bad.is_sound:
            verdict = judge_answer(verdicts)
        verdicts[subject.name] = verdict
        yield Seen(subject.name, verdict, f"{bad.name} ({bad.original})")
    shutil.rmtree(place)


def judge_answer(verdicts: Mapping[str, Verdict]) -> Verdict:
    """What to think of `verify` finding nothing: right if all that was made of the input is."""
    made = [verdict for name, verdict in verdicts.items() if name.startswith("ckptkit") and name != INSPECT.name]
    return Verdict.RIGHT if all(verdict is Verdict.RIGHT for verdict in made) else Verdict.SILENT


def attempt(subject: Subject, bad: Bad, sound: Original, src: Path, place: Path) -> Verdict:
    """Let a subject make its output in a directory of its own, and judge what it came to."""
    good = sound_output(subject, sound.name) if bad.truth is None else None
    truth = sound.truth if bad.truth is None else bad.truth
    place.mkdir()
    canary_of(src).unlink(missing_ok=True)
    try:
        ended = start(subject, src, place / "out", bad.seconds)
        verdict = judge_run(ended, bad, place if subject.is_ours else place / "out")
        if verdict is Verdict.RIGHT and (good is None or digest(place / "out") != good or not subject.makes):
            verdict = judge_output(subject, place / "out", ended, truth)
        if verdict is Verdict.SILENT and subject is INSPECT and is_warned_of(ended, bad.culprits):
            verdict = Verdict.CLEAN  # it shows the parts that can be read
        return Verdict.ACCEPTED if canary_of(src).exists() else verdict
    finally:
        shutil.rmtree(place)


def start(subject: Subject, src: Path, out: Path, seconds: float) -> Ended:
    """Run a subject; what it said as JSON of errors is put into lines."""
    limits = {resource.RLIMIT_AS: _ROOM}
    arguments = subject.arguments(src, out)
    return in_lines(server(subject.is_ours).run(subject.target, arguments, limits=limits, timeout=seconds))


def judge_run(ended: Ended, bad: Bad, left: Path) -> Verdict:
    """What a run came to, `RIGHT` until its output has been looked at; `left` is where an error may leave nothing."""
    if ended.code is None:
        return Verdict.HANG
    if ended.rss > bad.memory:
        return Verdict.BLOATED
    if ended.code == 0:
        return Verdict.ACCEPTED if bad.refused else Verdict.RIGHT
    is_left = any(path.is_file() for path in (left, *left.rglob("*")))
    return Verdict.HALF if is_left else judge_error(ended, bad.culprits)


def judge_output(subject: Subject, out: Path, ended: Ended, truth: Mapping[str, Any]) -> Verdict:
    """Whether what came out is the truth; what cannot even be read is not."""
    try:
        found = subject.read(out, ended)
    except Exception:  # noqa: BLE001 - of whichever library
        return Verdict.SILENT
    return Verdict.RIGHT if are_equal(found, subject.sees(truth)) else Verdict.SILENT


def in_lines(ended: Ended) -> Ended:
    """A run whose errors are lines, whether it told them so or as JSON; that a check found something is one too."""
    if not ended.out.startswith("{") or ended.code == 0:
        return ended
    told: dict[str, Any] = json.loads(ended.out)
    problems = told["problems"] if "problems" in told else [told["error"]]
    lines = [f"{problem['path']}: {problem['tensor']}: {problem['message']}" for problem in problems]
    code = 3 if ended.code == 1 and "problems" in told else ended.code
    return replace(ended, code=code, err=f"{ended.err}\nerror: {' '.join(' '.join(lines).split())}")


@cache
def sound_output(subject: Subject, name: str) -> str:
    """The digest of what a subject makes of the original `name` as it is, which has to be right."""
    sound = original(name)
    place = sound.root.parent / "sound"
    place.mkdir()
    try:
        ended = start(subject, sound.root, place / "out", 60)
        verdict = Verdict.UNFIRED if ended.code != 0 else judge_output(subject, place / "out", ended, sound.truth)
        if verdict is not Verdict.RIGHT:
            raise AssertionError(f"{subject.name} on the sound `{sound.name}`: {verdict}\n{ended.out}\n{ended.err}")
        return digest(place / "out")
    finally:
        shutil.rmtree(place)


@cache
def server(is_ours: bool) -> Server:
    """The server of ckptkit or of the peers, until this process ends."""
    found = Server(*(_OURS if is_ours else _THEIRS)).__enter__()
    atexit.register(found.__exit__, None, None, None)
    return found
