"""The table of Pythons and torches: it keeps the rows of other cases, and says what was not run."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from scripts import matrix
from scripts.markdown import write_part
from scripts.matrix import NEWEST, TESTED, Case, counted, describe, known_rows, slow_tests

CASES = [Case("3.11", "2.10", TESTED), Case("3.14", "2.15", TESTED), Case("3.14", "2.15", NEWEST)]


def ended(code: int, last: str) -> CompletedProcess[str]:
    return CompletedProcess([], code, f"....\n{last}\n", "")


def test_a_row_stays_until_its_case_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {matrix.PART} -->\n<!-- end of {matrix.PART} -->\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    rows = {CASES[0]: ["3.11.7", "2.10.0", TESTED, "1,234 passed", "2026-11-27"]}
    write_part(page, matrix.PART, describe(rows, CASES))
    again = {CASES[1]: ["3.14.7", "2.15.0", TESTED, "failed: install", "2026-11-28"]}
    write_part(page, matrix.PART, describe(known_rows(CASES) | again, CASES))
    assert known_rows(CASES) == rows | again | {CASES[2]: ["3.14", "2.15", NEWEST, "not run", ""]}


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([ended(0, "1200 passed, 30 skipped in 9.1s"), ended(0, "34 passed in 2s")], "1,234 passed, 30 skipped"),
        (
            [ended(0, "9 passed in 1s"), ended(1, "1 failed, 2 passed, 3 errors in 2s")],
            "failed: 1 failed, 3 error, 11 passed",
        ),
        ([ended(4, "ERROR: not found")], "failed: pytest"),
    ],
)
def test_results_are_counted(ends: list[CompletedProcess[str]], said: str) -> None:
    assert counted(ends) == said


def test_it_runs_the_tests_of_private_names() -> None:
    assert {"tests/training/saving", "tests/test_private_names.py"} <= set(slow_tests())
