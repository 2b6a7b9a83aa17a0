"""Run `scripts/faults meaning [THING [COMMAND [FORMAT]]]`: what became of each thing in each command, as a table.

Each of the three may be several, with commas between them. `--json` prints every run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from scripts.markdown import table
from tests.faults.meaning import BAD, COMMANDS, Outcome, Run, try_thing
from tests.faults.meaning_sources import FORMATS
from tests.faults.meaning_things import THINGS, thing_of

_WORKERS = 2
Names = list[str] | None


def run_all(things: Sequence[str], commands: Names, formats: Names) -> Iterator[Run]:
    """Yield the runs of each thing, in the order of the list."""
    if len(things) == 1:
        yield from run_one(things[0], commands, formats)
        return
    with ProcessPoolExecutor(_WORKERS, mp_context=get_context("spawn")) as workers:
        for done in [workers.submit(run_one, name, commands, formats) for name in things]:
            yield from done.result()


def run_one(name: str, commands: Names, formats: Names) -> list[Run]:
    """Return the runs of one thing, in a worker."""
    return list(try_thing(thing_of(name), formats, commands))


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """Return the table: in each cell how many formats came to which outcome."""
    commands = [name for name in COMMANDS if any(run.command == name for run in runs)]
    found: dict[str, dict[str, Counter[Outcome]]] = {}
    for run in runs:
        found.setdefault(run.thing, {}).setdefault(run.command, Counter())[run.outcome] += 1
    rows = [[thing, *(cell(row.get(name, Counter())) for name in commands)] for thing, row in found.items()]
    return [["thing", *commands], *rows]


def cell(outcomes: Counter[Outcome]) -> str:
    """Return the outcomes with their counts, the worst last."""
    return ", ".join(f"{outcomes[each]} {each}" for each in Outcome if outcomes[each])


def show(runs: Sequence[Run], bad: Sequence[Run], seconds: float) -> None:
    """Print the table, and each run that is not as it should be."""
    print(table(rows_of(runs)), end="\n\n")
    for run in bad:
        print(f"- {run.thing} {run.command} {run.format}: {run.outcome}: {run.why}")
    counts = Counter(run.outcome for run in runs)
    print(", ".join(f"{counts[outcome]:,} {outcome}" for outcome in Outcome if counts[outcome]))
    print(f"{len(runs):,} runs in {seconds / 60:.1f} minutes.")


def read_names(known: Sequence[str], text: str) -> list[str]:
    """Return names that have commas between them."""
    found = text.split(",")
    if unknown := set(found) - set(known):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; found {', '.join(sorted(unknown))}")
    return found


def main(words: Sequence[str]) -> int:
    """Run what is asked for; return 1 if any run was silent, crashed, or refused without naming the thing."""
    things = [thing.name for thing in THINGS]
    parser = argparse.ArgumentParser(prog="scripts/faults meaning", description="Try one thing more than the weights.")
    for name, known in (("things", things), ("commands", list(COMMANDS)), ("formats", list(FORMATS))):
        told = f"of: {', '.join(known)}; all by default"
        parser.add_argument(name, nargs="?", metavar=name[:-1].upper(), type=partial(read_names, known), help=told)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(words)
    began = time.perf_counter()
    runs = list(run_all(options.things or things, options.commands, options.formats))
    bad = [run for run in runs if run.outcome in BAD]
    if options.json:
        print(json.dumps([{name: str(getattr(run, name)) for name in Run.__slots__} for run in runs]))
    else:
        show(runs, bad, time.perf_counter() - began)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
