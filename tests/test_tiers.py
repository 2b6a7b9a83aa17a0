"""Which parameters scripts/test keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiers import nightly_but, pairs, slow_but


def kept(parameters: list[Any]) -> list[Any]:
    return [each.values for each in parameters if not each.marks]


@pytest.mark.parametrize(
    ("first", "second"), [("abcdefg", (1, 2, 3)), ("ab", range(5)), ("a", range(4)), ("abc", "xyz")]
)
def test_pairs_try_each_value_and_nightly_tries_the_product(first: str, second: Any) -> None:
    parameters = pairs(first, second)
    assert len(parameters) == len(first) * len(second)
    some = kept(parameters)
    assert len(some) == max(len(first), len(second))
    assert {one for one, _ in some} == set(first)
    assert {two for _, two in some} == set(second)


def test_a_case_that_is_kept_must_be_there() -> None:
    assert kept(nightly_but([("b", 2)], [("a", 1), ("b", 2)])) == [("b", 2)]
    assert kept(nightly_but("ac", "abc")) == [("a",), ("c",)]
    with pytest.raises(ValueError, match="found also"):
        nightly_but("ad", "abc")


def test_a_case_that_is_not_kept_has_the_mark_of_the_next_script() -> None:
    marks = [
        [mark.name for parameters in make("a", "ab") for mark in parameters.marks] for make in (nightly_but, slow_but)
    ]
    assert marks == [["nightly"], ["slow"]]
