"""Series: what is left of very many numbers, what is broken, and what was taken again."""

from __future__ import annotations

import math
from itertools import pairwise

from ckptkit.plugins.report.curves import unbroken_groups
from ckptkit.plugins.report.history import Series


def filled(*pairs: tuple[float, float]) -> Series:
    series = Series("loss")
    for step, value in pairs:
        series.add_value(step, value)
    return series


def test_few_numbers_stay_as_they_are() -> None:
    series = filled((1, 3.0), (2, 2.5), (3, 2.75))
    assert [(one.first, one.mean, one.count) for one in series.stretches] == [(1, 3.0, 1), (2, 2.5, 1), (3, 2.75, 1)]
    assert (series.low, series.high, series.latest) == (2.5, 3.0, 2.75)


def test_of_very_many_the_extremes_and_the_mean_stay() -> None:
    series = Series("loss")
    for step in range(100_000):
        series.add_value(step, 500.0 if step == 77_777 else step % 2)
    assert 300 < len(series.stretches) <= 1000
    assert series.high == 500
    assert sum(one.count for one in series.stretches) == 100_000
    assert sum(one.total for one in series.stretches) == 50_000 - 1 + 500
    assert all(one.first <= one.last < other.first for one, other in pairwise(series.stretches))
    (spike,) = (one for one in series.stretches if one.high == 500)
    assert spike.first <= 77_777 <= spike.last


def test_steps_taken_again_replace_what_there_was() -> None:
    series = filled(*((step, 1.0) for step in range(100)), *((step, 2.0) for step in range(50, 80)))
    assert [one.mean for one in series.stretches] == [1.0] * 50 + [2.0] * 30
    assert series.stretches[-1].last == 79


def test_a_long_run_that_goes_back_forgets_the_rest() -> None:
    series = Series("loss")
    for step in range(5000):
        series.add_value(step, 1.0)
    for step in range(2000, 2500):
        series.add_value(step, 2.0)
    assert series.stretches[-1].last == 2499
    assert {one.high for one in series.stretches if one.first >= 2000} == {2.0}
    assert {one.low for one in series.stretches if one.last < 2000} == {1.0}


def test_what_is_no_finite_number_breaks_the_line() -> None:
    series = filled((1, 1.0), (2, math.nan), (3, math.inf), (4, 1.0), (5, 1.0))
    assert series.bad == [2, 3]
    assert series.bad_count == 2
    assert [[one.first for one in piece] for piece in unbroken_groups(series.stretches)] == [[1], [4, 5]]
    series.add_value(3, 1.0)
    assert series.bad == [2]


def test_a_gap_breaks_the_line_and_another_stride_does_so_once() -> None:
    series = filled(*((step, 1.0) for step in [1, 2, 3, 100, 101, 102, 112, 122, 132]))
    assert [len(piece) for piece in unbroken_groups(series.stretches)] == [3, 3, 3]


def test_nothing_but_nan_and_gaps_stays_small() -> None:
    series = Series("loss")
    for step in range(50_000):
        series.add_value(step, math.nan if step % 2 else 1.0)
    assert len(series.stretches) <= 1000
    assert len(series.bad) == 100
    assert series.bad_count == 25_000
