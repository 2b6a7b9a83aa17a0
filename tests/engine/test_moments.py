"""Mean and spread, however the numbers are parted, against sums of fractions, which lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.counting import Array, Moments, measure_moments, moments_of_repeated_values

floats = st.floats(-1e6, 1e6, allow_subnormal=False)


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    """Let a part be a few numbers, and a row of the dot product fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.engine.counting._PART", 7)
        patch.setattr("ckptkit.engine.counting._ROW", 3)
        yield


def plain(values: Array) -> Array:
    return values


def of(numbers: list[float]) -> Moments:
    return measure_moments(np.array(numbers, np.float64), plain)


def assert_are_of(found: Moments, numbers: list[float]) -> None:
    exact = [Fraction(number) for number in numbers]
    mean = sum(exact) / len(exact)
    variance = sum((number - mean) ** 2 for number in exact) / len(exact)
    size = float(max(map(abs, exact)))
    assert found.finite == len(exact)
    assert found.mean == pytest.approx(float(mean), rel=1e-13, abs=1e-14 * size)
    assert found.deviation == pytest.approx(sqrt(variance), rel=1e-9, abs=1e-11 * size)
    assert found.norm == pytest.approx(sqrt(sum(number**2 for number in exact)), rel=1e-12)


@given(st.lists(floats, min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_parts_are_put_together(numbers: list[float], cuts: list[int]) -> None:
    found = Moments()
    for start, stop in pairwise(sorted({0, len(numbers), *(cut for cut in cuts if cut < len(numbers))})):
        found = found.merge(of(numbers[start:stop]))
    assert_are_of(found, numbers)


def test_a_spread_much_smaller_than_the_mean_is_not_lost() -> None:
    numbers = [1e9 + i / 1024 for i in range(100)]
    assert of(numbers).deviation == pytest.approx(np.std(np.arange(100)) / 1024, rel=1e-9)


@pytest.mark.parametrize("number", [0.1, -3e-40, 1e300, 60.0])
def test_what_is_all_the_same_does_not_deviate(number: float) -> None:
    found = of([number] * 100)
    assert (found.mean, found.deviation) == (number, 0.0)


def test_what_is_not_finite_is_left_out() -> None:
    assert of([np.nan, 1.0, np.inf, 3.0, -np.inf]) == of([1.0, 3.0])
    assert of([np.nan] * 20) == of([]) == Moments()
    assert (Moments().mean, Moments().deviation, Moments().norm) == (0.0, 0.0, 0.0)


def test_squares_beyond_float64() -> None:
    found = of([1e300, -1e300, 1e300, 1e300] * 10)
    assert found.mean == pytest.approx(5e299)
    assert (found.norm, found.deviation) == (np.inf, np.inf)


def test_rounding_takes_no_mean_beyond_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.engine.counting._PART", 100)
    largest = float(np.finfo(np.float64).max)
    for number in (largest, -largest):
        found = of([float(np.nextafter(number, 0.0))] + [number] * 8)
        assert found.mean == pytest.approx(number, rel=1e-14)


@given(st.lists(st.sampled_from([0.5, -6.0, 0.0, 448.0]), min_size=1, max_size=40))
def test_numbers_that_occur_often(numbers: list[float]) -> None:
    values = np.array([0.5, -6.0, 0.0, 448.0, np.nan])
    often = np.array([*(numbers.count(value) for value in values[:-1]), 3])
    assert_are_of(moments_of_repeated_values(values, often), numbers)
    assert moments_of_repeated_values(values[-1:], often[-1:]) == Moments()
