"""The numbers on the axes of curves."""

from __future__ import annotations

import pytest

from ckptkit.plugins.report.curves import log_scale_ticks, round_ticks


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 60), (3.2, 5.4), (-1e-9, 1e-9), (1e6, 1.00001e6), (5, 5)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = round_ticks(low, high)
    assert 1 <= len(found) <= 9
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in found)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1e3), (1.2, 99), (1e-30, 1e30)])
def test_powers_are_few_and_inside(low: float, high: float) -> None:
    found = log_scale_ticks(low, high)
    assert 2 <= len(found) <= 9
    assert all(low * 0.99 <= power <= high * 1.01 for power in found)
