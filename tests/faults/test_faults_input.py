"""The fast share of the fault matrix, of damaged, mixed, forged and hostile inputs: `scripts/faults` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from scripts.markdown import table
from tests.faults import (
    adapters,
    bad_inputs,
    flips,
    forged,
    hostile_paths,
    hostile_pickles,
    hostile_sizes,
    prunes,
    quantized,
    salvages,
    tree_inputs,
    tree_runs,
    zips,
)
from tests.faults.cases import Case, Seen
from tests.faults.mutations import changed
from tests.faults.parsers import PARSERS, Parser, is_total
from tests.faults.server import Ended
from tests.faults.tables import UNTOLD, Tally, rows_of
from tests.faults.verdicts import GOOD, Verdict, judge_error
from tests.tiers import nightly_but

MODULES = (
    *(bad_inputs, forged, hostile_pickles, hostile_paths, hostile_sizes, zips, flips, prunes, adapters, quantized),
    *(salvages, tree_inputs, tree_runs),
)
EVERY: tuple[Case, ...] = tuple(case for module in MODULES for case in module.CASES)
CASES = [case for case in EVERY if case.group != UNTOLD]


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly_but(CASES[::8], CASES), ids=lambda case: f"{case.numbers} {case.name}")
def test_nothing_is_wrong_in_silence(case: Case, tmp_path: Path) -> None:
    seen = list(case.run(tmp_path, False))
    if case.run is not hostile_paths.opened:  # which takes strace, and time
        assert any(one.verdict is not Verdict.UNFIRED for one in seen)
    assert [one for one in seen if one.verdict not in GOOD] == []


@pytest.mark.slow
@pytest.mark.parametrize("parser", nightly_but(PARSERS[::5], PARSERS), ids=lambda parser: parser.name)
def test_parsers_are_total(parser: Parser, tmp_path: Path) -> None:
    parser.lay(tmp_path)
    for data in parser.found:
        is_total(parser, data, tmp_path)

    @settings(database=None, suppress_health_check=list(HealthCheck))
    @given(changed(parser.seeds()))
    def try_input(data: bytes) -> None:
        is_total(parser, data, tmp_path)

    try_input()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "verdict"), [("6", Verdict.SILENT), ("22", Verdict.SILENT), ("31", Verdict.ACCEPTED)]
)
def test_what_others_do_wrong_is_seen(number: str, verdict: Verdict, tmp_path: Path) -> None:
    case = next(case for case in EVERY if case.numbers == number)
    assert any(one.subject.startswith("torch") and one.verdict is verdict for one in case.run(tmp_path, True))


@pytest.mark.nightly
def test_what_nothing_shows_is_seen_too(tmp_path: Path) -> None:
    case = next(case for case in EVERY if case.group == UNTOLD and case.numbers == "18")
    assert any(one.verdict is Verdict.SILENT for one in case.run(tmp_path, False))


def test_a_table_counts_ours_apart_from_others() -> None:
    case = Case("1", "data", "cut", lambda place, whole: iter(()))
    tally = Tally(["data", UNTOLD])
    for subject, verdict in (
        ("ckptkit verify", Verdict.CLEAN),
        ("ckptkit verify", Verdict.SILENT),
        ("torch", Verdict.LOST),
    ):
        tally.add("data", case, Seen(subject, verdict, "half"))
    tally.add("data", case, Seen("ckptkit verify", Verdict.UNFIRED, "half"))
    tally.add(UNTOLD, Case("18", UNTOLD, "mixed", case.run), Seen("ckptkit convert", Verdict.SILENT, "a shard"))
    assert tally.runs == 4
    assert [seen.verdict for _, seen in tally.bad] == [Verdict.SILENT]
    rows = table(rows_of("ckptkit", tally)).splitlines()
    assert rows[2:] == [
        "| data | 2 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |",
        "| **all** | 2 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |",
        f"| *{UNTOLD}* | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |",
    ]


@pytest.mark.parametrize(
    ("code", "err", "verdict"),
    [
        (3, "error: a.pt: cut", Verdict.CLEAN),
        (3, "note: b\nerror: a.pt: cut\nhint: c", Verdict.CLEAN),
        (3, "error: b.pt: cut", Verdict.UNNAMED),
        (3, "hint: a.pt", Verdict.UNNAMED),
        (3, "error: a.pt: cut\nerror: a.pt: cut", Verdict.UNNAMED),
        (1, "error: a.pt: cut", Verdict.TRACEBACK),
        (3, "Traceback (most recent call last):\nerror: a.pt", Verdict.TRACEBACK),
        (-11, "", Verdict.TRACEBACK),
        (None, "", Verdict.HANG),
    ],
)
def test_an_error_is_clean_if_it_names_the_culprit(code: int | None, err: str, verdict: Verdict) -> None:
    assert judge_error(Ended(code, "", err, 0, 0), ["a.pt"]) is verdict
