"""Run the fault matrix: `scripts/faults [GROUP ...]` runs the cases of `tests/faults` and prints what came of them.

`scripts/faults meaning [THING [COMMAND [FORMAT]]]` has a table of its own: a thing a row, a command a column.

`--write` puts a table of all families into docs/reliability.md. With a group, as in `scripts/faults store --cases
--write`, it goes into the part of that group, if the page has one.

Ends with status 1 if a run of ckptkit's came to anything but the right result or a clean error.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import tests.faults
from scripts.markdown import ROOT, paragraph, table, write_part
from tests.faults.cases import Case, Seen
from tests.faults.tables import FAMILIES, Tally, rows_of

_WORKERS = 2
_PAGE = ROOT / "docs" / "reliability.md"


@dataclass(frozen=True, slots=True)
class Listed:
    """A case, and where another process finds it again: a module, and the place in its list."""

    case: Case
    module: str
    place: int


@cache
def list_cases() -> list[Listed]:
    """Return every case of every module of the fault matrix that has any."""
    home = Path(tests.faults.__path__[0])
    names = [name for _, name, _ in pkgutil.iter_modules([str(home)]) if not name.startswith("test_")]
    modules = [f"tests.faults.{name}" for name in names if "\nCASES" in (home / f"{name}.py").read_text()]
    return [Listed(case, name, i) for name in modules for i, case in enumerate(import_module(name).CASES)]


def run_case(module: str, place: int, whole: bool) -> list[Seen]:
    """Run one case in a directory of its own, in a worker."""
    home = Path(tempfile.mkdtemp(prefix="case-"))
    try:
        return list(import_module(module).CASES[place].run(home, whole))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def run_all(cases: Sequence[Listed], *, whole: bool) -> Iterator[tuple[Case, list[Seen]]]:
    """Yield each case with what was seen, in the order in which they end."""
    with ProcessPoolExecutor(_WORKERS, mp_context=get_context("spawn")) as workers:
        waiting: dict[Future[list[Seen]], Case] = {
            workers.submit(run_case, listed.module, listed.place, whole): listed.case for listed in cases
        }
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def tell(text: str) -> None:
    """Write the line that says how far it has got, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def count(cases: Sequence[Listed], *, whole: bool, by_case: bool) -> Tally:
    """Run the cases and count what came of them, by group or case, in the order of the list."""
    rows = {id(listed.case): describe(listed.case) if by_case else listed.case.group for listed in cases}
    tally = Tally(list(dict.fromkeys(rows.values())))
    for i, (case, seen) in enumerate(run_all(cases, whole=whole), start=1):
        for one in seen:
            tally.add(rows[id(case)], case, one)
        tell(f"{i} of {len(cases)} cases, {tally.runs:,} runs, {len(tally.bad)} of ckptkit's not as they should be")
    tell("")
    return tally


def describe(case: Case) -> str:
    """Return the name of a case's row."""
    return f"{case.numbers} {case.name}"


def show(tally: Tally, seconds: float) -> None:
    """Print the tables, and what of ours went wrong."""
    for family in FAMILIES:
        if tally.has(family):
            print(table(rows_of(family, tally)), end="\n\n")
    for case, seen in tally.bad:
        print(f"- {seen.subject}: {seen.verdict}: {describe(case)}: {seen.what}")
    print(f"{tally.runs:,} runs in {seconds / 60:.1f} minutes.")


def write(tally: Tally, seconds: float, arguments: Sequence[str], groups: Sequence[str]) -> None:
    """Write the tables into their part of the page on reliability: of all groups, or of these."""
    command = " ".join(["scripts/faults", *arguments])
    families = [family for family in FAMILIES if tally.has(family)]
    head = f"""`{command}` on {datetime.now(UTC):%Y-%m-%d}: {tally.runs:,} runs of {", ".join(families)} in
        {seconds / 60:.1f} minutes on {len(os.sched_getaffinity(0))} cores."""
    tables, absent = fold([rows_of(family, tally) for family in families])
    head += f" No run ended with: {', '.join(absent)}." * bool(absent)
    write_part(_PAGE, " ".join(["faults", *groups]), "\n\n".join([paragraph(head).strip(), *map(table, tables)]))


def fold(tables: list[list[list[str]]]) -> tuple[list[list[list[str]]], list[str]]:
    """Return the tables without the outcomes that no run had, and these outcomes.

    A cell that is 0 becomes empty, except in the row of the sum. A row loses the number of its case.
    """
    head = tables[0][0]
    seen = [i for i in range(len(head)) if i < 2 or any(row[i] != "0" for rows in tables for row in rows[1:])]
    folded = [[[row[i] for i in seen] for row in rows] for rows in tables]
    shown = [
        [rows[0], *([re.sub(r"^\d+ ", "", name), *(blank(name, cell) for cell in row)] for name, *row in rows[1:])]
        for rows in folded
    ]
    return shown, [name for i, name in enumerate(head) if i not in seen]


def blank(name: str, cell: str) -> str:
    """Return the cell of a row, without a 0 unless the row is the sum."""
    return "" if cell == "0" and name != "**all**" else cell


def to_json(tally: Tally, seconds: float) -> dict[str, object]:
    """Return the same for programs."""
    bad = [
        {"subject": seen.subject, "verdict": seen.verdict, "case": describe(case), "what": seen.what}
        for case, seen in tally.bad
    ]
    return {"ok": not tally.bad, "runs": tally.runs, "seconds": seconds, "rows": tally.counts, "bad": bad}


def main() -> None:
    """Parse the command line."""
    if sys.argv[1:2] == ["meaning"]:
        from scripts.meaning import main as try_things

        sys.exit(try_things(sys.argv[2:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is cleared away
    groups = list(dict.fromkeys(listed.case.group for listed in list_cases()))
    parser = argparse.ArgumentParser(prog="scripts/faults", description="Try ckptkit and its peers under faults.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of: {', '.join(groups)}; all by default")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--whole", action="store_true", help="all of every case, and the peers: the default")
    much.add_argument("--fast", action="store_true", help="the share of it that the tests run, without the peers")
    parser.add_argument("--cases", action="store_true", help="a row for each case, not for each group")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {_PAGE.relative_to(ROOT)} too")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(groups):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    cases = [listed for listed in list_cases() if not options.groups or listed.case.group in options.groups]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as home:
        os.environ["TMPDIR"] = tempfile.tempdir = home  # the workers leave there what they need until the end
        try:
            tally = count(cases, whole=not options.fast, by_case=options.cases)
        finally:
            tempfile.tempdir = None
    seconds = time.perf_counter() - began
    if options.write:
        write(tally, seconds, [word for word in sys.argv[1:] if word != "--write"], options.groups)
    if options.json:
        print(json.dumps(to_json(tally, seconds)))
    else:
        show(tally, seconds)
    sys.exit(bool(tally.bad))


if __name__ == "__main__":
    main()
