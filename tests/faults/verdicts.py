"""Verdicts: what became of one run under a fault. Judges the exit and the words; outputs are compared by the cases."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tests.faults.server import Ended

ERROR_CODES = frozenset({2, 3, 4, 5, 6, 130, 143})


class Verdict(StrEnum):
    """How a run ended; the values are the columns of the table."""

    RIGHT = "right"
    CLEAN = "clean error"  # one `error:` line that names the file or the tensor, and an exit code of the contract
    UNNAMED = "unnamed error"
    TRACEBACK = "traceback"
    HANG = "hang"
    BLOATED = "over memory"
    HALF = "half output"
    LOST = "lost"
    SILENT = "silent wrong"
    MIXED = SILENT  # a mixture of old and new that loads
    ACCEPTED = "hostile accepted"  # code of the checkpoint's ran, or a path of its was followed
    UNFIRED = "unfired"  # the fault never happened: not counted


GOOD = frozenset({Verdict.RIGHT, Verdict.CLEAN, Verdict.UNFIRED})


def is_warned_of(ended: Ended, culprits: Sequence[str]) -> bool:
    """True if a warning names one of the culprits."""
    warnings = [line for line in ended.err.splitlines() if line.startswith("warning:")]
    return any(culprit in line for culprit in culprits for line in warnings)


def judge_error(ended: Ended, culprits: Sequence[str]) -> Verdict:
    """How a run that did not succeed said so; any of `culprits` named in its errors will do (none: any error will)."""
    if ended.code is None:
        return Verdict.HANG
    lines = ended.err.splitlines()
    if ended.code not in ERROR_CODES or any(line.startswith("Traceback (most recent call last)") for line in lines):
        return Verdict.TRACEBACK
    errors = [line for line in lines if line.startswith("error:")]
    named = not culprits or any(culprit in line for culprit in culprits for line in errors)
    return Verdict.CLEAN if len(errors) == 1 and named else Verdict.UNNAMED
