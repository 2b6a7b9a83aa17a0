"""Readings: `ckptkit verify` and `inspect` under calls that fail; what could not be read is never called whole.

Part of cases 39 to 46: the commands that only read.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.faults.cases import Case, Seen
from tests.faults.originals import original
from tests.faults.points import Trouble, spread
from tests.faults.server import Ended
from tests.faults.shim import Fault
from tests.faults.stage import serve
from tests.faults.verdicts import Verdict, judge_error

_READING = ("open", "read", "stat", "list", "close")
_FEW, _MANY = 2, 30
_COMMANDS = {"ckptkit verify": ["verify"], "ckptkit inspect": ["inspect", "--chunks"]}
TROUBLES = (
    Trouble("EIO", "error", errno.EIO, _READING),
    Trouble("EIO from there on", "error", errno.EIO, _READING, forever=True),
    Trouble("ESTALE", "error", errno.ESTALE, _READING),
    Trouble("EMFILE", "error", errno.EMFILE, ("open", "list")),
    Trouble("half of it", "short", 0, ("read",), is_harmless=True),
    Trouble("EINTR", "error", errno.EINTR, ("open", "read", "close"), is_harmless=True),
)


def try_reading(troubles: tuple[Trouble, ...], place: Path, whole: bool) -> Iterator[Seen]:
    """Let each trouble come to every call of commands that read a checkpoint with a manifest."""
    for name in ("dcp", "hf", "pt", "zero2", "ranks", "items") if whole else ("dcp",):
        root = place / name / "checkpoint"
        shutil.copytree(original(name).root, root)
        assert serve().run("ckptkit", ["manifest", str(root)]).code == 0
        for subject, words in _COMMANDS.items():
            command = [*words, str(root)]
            sound = serve().run("ckptkit", command)
            for trouble in troubles:
                fault = Fault(str(root.parent), kind=trouble.kind, number=trouble.number, calls=trouble.calls)
                total = serve().run("ckptkit", command, fault=replace(fault, kind="nothing", forever=True)).fired
                for at in spread(total, _MANY if whole else _FEW):
                    ended = serve().run("ckptkit", command, fault=replace(fault, at=at, forever=trouble.forever))
                    verdict = judge(ended, sound, trouble, root) if ended.fired else Verdict.UNFIRED
                    where = ended.where.replace(f"{root}/", "")
                    said = json.dumps((ended.err.strip() or ended.out)[-200:])
                    yield Seen(subject, verdict, f"{name}, {trouble.name} at {at} of {total}, {where}: {said}")


def judge(ended: Ended, sound: Ended, trouble: Trouble, root: Path) -> Verdict:
    """What a command made of it that is to say the same as ever, or what it could not read."""
    if ended.code == 0:
        return Verdict.RIGHT if ended.out == sound.out else Verdict.SILENT
    if trouble.is_harmless:
        return Verdict.UNNAMED
    if ended.code == 1 and any(line.startswith("problem: ") and str(root) in line for line in ended.out.splitlines()):
        return Verdict.CLEAN
    return judge_error(ended, [str(root.parent)])  # notes of trainers lie beside a checkpoint too


CASES = (Case("40-43", "io", "commands that only read", partial(try_reading, TROUBLES)),)
