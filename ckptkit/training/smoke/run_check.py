"""Run one check of a smoke test or of a script, and keep its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptkit.errors import CkptError


class CheckFailed(Exception):
    """A check failed; the message says why."""


class CheckSkipped(Exception):
    """A check cannot run here, or cannot decide; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `ok` is None for a skipped check; `detail` says why, or what was compared."""

    name: str
    ok: bool | None
    detail: str
    seconds: float


def run_check(name: str, check: Callable[[], str]) -> Check:
    """Return the result of one check: `check` returns a description of what it compared, or raises."""
    started = time.perf_counter()
    ok: bool | None = True
    try:
        detail = check()
    except CheckSkipped as reason:
        ok, detail = None, str(reason)
    except CheckFailed as reason:
        ok, detail = False, str(reason)
    except Exception as error:  # noqa: BLE001 - whatever it was, the check failed and the table must say so
        ok, detail = False, error.line if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return Check(name, ok, detail, time.perf_counter() - started)
