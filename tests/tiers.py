"""Parameters of tests of which scripts/test tries a share, and scripts/nightly all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def nightly_but(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test; those that are not `kept` run only in scripts/nightly.

    Raises ValueError if one to keep is no case, lest a renamed case leave scripts/test.
    """
    kept, cases = list(kept), list(cases)
    if strangers := [each for each in kept if each not in cases]:
        raise ValueError(f"expected cases of the test to keep, found also {strangers}")
    return [_parameter(case, case in kept) for case in cases]


def pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return every pair as parameters of a test; scripts/test runs just enough of them to try each value of both."""
    return [
        _parameter((one, two), i % len(second) == j % len(first))
        for i, one in enumerate(first)
        for j, two in enumerate(second)
    ]


def _parameter(case: Any, is_kept: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=() if is_kept else pytest.mark.nightly)
