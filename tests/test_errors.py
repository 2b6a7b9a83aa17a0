"""Errors are one line in plain English, whatever the numbers are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import and_more

PACKAGE = Path(ckptkit.__file__).parent


@pytest.mark.parametrize(
    ("number", "words"), [(-2, ""), (0, ""), (1, " and 1 more"), (2, " and 2 more"), (1234, " and 1,234 more")]
)
def test_there_may_be_no_more(number: int, words: str) -> None:
    assert and_more(number) == words


def test_no_message_counts_the_rest_by_itself() -> None:
    """`it and 0 more`, `nor 0 others`, `1 others`."""
    counted = re.compile(r"(and|nor|with|do) \{(?!count\()[^{}]* - [^{}]*\} (more|others?)\b")
    found = {path.name: counted.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}
