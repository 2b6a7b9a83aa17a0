"""Parameters of tests of which scripts/check or scripts/test tries a share, and the next script all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def nightly_but(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test; those that are not `kept` run only in scripts/nightly.

    Raises ValueError if one to keep is no case, lest a renamed case leave scripts/test.
    """
    return _marked_but(kept, cases, pytest.mark.nightly)


def slow_but(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test; scripts/check leaves out those that are not `kept`.

    Raises ValueError if one to keep is no case, lest a renamed case leave scripts/check.
    """
    return _marked_but(kept, cases, pytest.mark.slow)


def _marked_but(kept: Iterable[Any], cases: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    kept, cases = list(kept), list(cases)
    if strangers := [each for each in kept if each not in cases]:
        raise ValueError(f"expected cases of the test to keep, found also {strangers}")
    return [_parameter(case, () if case in kept else mark) for case in cases]


def pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return every pair as parameters of a test; scripts/test runs just enough of them to try each value of both."""
    return [
        _parameter((one, two), () if i % len(second) == j % len(first) else pytest.mark.nightly)
        for i, one in enumerate(first)
        for j, two in enumerate(second)
    ]


def _parameter(case: Any, marks: pytest.MarkDecorator | tuple[()]) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
