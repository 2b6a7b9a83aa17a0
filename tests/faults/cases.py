"""Cases: a kind of fault, and what each subject made of it. Runs none by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run came to: of `subject` ("ckptkit consolidate", a peer's name), under the fault that `what` says."""

    subject: str
    verdict: Verdict
    what: str


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the matrix: the cases of it by number ("1-4"), the group it is summed in, and how to run it.

    `run` is given an empty working directory and whether the whole matrix is wanted or the fast share of it.
    """

    numbers: str
    group: str
    name: str
    run: Callable[[Path, bool], Iterator[Seen]]
