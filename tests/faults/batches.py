"""Batches: ckptkit called again and again on a file of which a bit is flipped, in one process. Judges nothing itself.

Run in a child of the server: thousands of flips take so a minute, and not a process each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import ckptkit
from ckptkit.errors import CkptError
from tests.faults.damage import flip_bit
from tests.faults.digests import digest
from tests.faults.verdicts import Verdict


def consolidate(src: Path, out: Path) -> str:
    """Model weights to Hugging Face's format, under the names that they have; what came out."""
    ckptkit.consolidate(src, out, names="keep", overwrite=True, sync=False)
    return digest(out)


def reshard(src: Path, out: Path) -> str:
    """For three ranks; what came out."""
    ckptkit.reshard(src, out, to=3, overwrite=True, sync=False)
    return digest(out)


def convert(src: Path, out: Path) -> str:
    """To a file of torch.save; what came out."""
    ckptkit.convert(src, out, to="pt", overwrite=True, sync=False)
    return digest(out)


def verify(src: Path, _: Path) -> str:
    """What is wrong."""
    for found in ckptkit.verify(src):
        for problem in found.problems:
            raise problem
    return ""


CALLS: dict[str, Callable[[Path, Path], str]] = {
    call.__name__: call for call in (consolidate, reshard, convert, verify)
}


def flip_each(name: str, src: str, out: str, file: str, flips: str) -> None:
    """Print what became of each flip, given as [offset, bit] of a file, as a list of verdicts."""
    call, path = CALLS[name], Path(src, file)
    good = call(Path(src), Path(out))
    verdicts = []
    for offset, bit in json.loads(flips):
        flip_bit(path, offset, bit)
        verdicts.append(outcome(lambda: call(Path(src), Path(out)), good))
        flip_bit(path, offset, bit)
    sys.stdout.write(json.dumps(verdicts))


def outcome(call: Callable[[], str], good: str) -> Verdict:
    """What a call came to that should give `good`."""
    try:
        return Verdict.RIGHT if call() == good else Verdict.SILENT
    except CkptError as error:
        return Verdict.CLEAN if error.path is not None or error.tensor is not None else Verdict.UNNAMED
    except BaseException:  # noqa: BLE001 - whatever it is, it is not told as it should be
        return Verdict.TRACEBACK
