"""Try every type of model of the installed transformers: `scripts/sweep` prints what differs from `save_pretrained`.

A small model of each type becomes a DCP checkpoint of 3 ranks, and ckptkit makes a Hugging Face model of it, whose
names, dtypes, shapes and bytes are compared with those that transformers writes. One process that fails, or takes too
long, costs only its type.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from queue import SimpleQueue

from scripts.markdown import ROOT, paragraph, table, write_part
from scripts.sweeping.result import BROKEN, DIFFERENT, EQUAL, FAILED, MEANINGS, NOT_BUILT, REFUSED, Result
from scripts.sweeping.team import RANKS, Team

PAGE = ROOT / "docs" / "names.md"
PART = "sweep"


def main() -> None:
    """Parse the command line, try each type, and show or write what came of them. Exits with 1 if one differs."""
    parser = argparse.ArgumentParser(prog="scripts/sweep", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("types", nargs="*", help="only these, as model_type in config.json calls them")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a type (default: 120)")
    parser.add_argument("--jobs", type=int, default=1, help=f"types at a time, each in {RANKS} processes (default: 1)")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := set(options.types).difference(all_types()):
        parser.error(f"transformers does not have the type `{min(unknown)}`")
    results = {}
    for model_type, result in sweep(options.types or all_types(), options.jobs, options.limit):
        results[model_type] = result
        print(f"{model_type}: {result.outcome} {result.reason}".strip(), file=sys.stderr, flush=True)
    if options.write:
        write_part(PAGE, PART, describe(results))
    else:
        print(describe(results))
    sys.exit(any(result.outcome == DIFFERENT for result in results.values()))


def all_types() -> list[str]:
    """Return the types of models that the installed transformers has."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING)


def sweep(types: Sequence[str], jobs: int, limit: float) -> Iterator[tuple[str, Result]]:
    """Yield each type, in order, with what came of it."""
    teams = [Team(limit) for _ in range(jobs)]
    free: SimpleQueue[Team] = SimpleQueue()
    for team in teams:
        free.put(team)

    def attempt(model_type: str) -> Result:
        team = free.get()
        try:
            return team.attempt(model_type)
        finally:
            free.put(team)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from zip(types, pool.map(attempt, types), strict=True)
    finally:
        for team in teams:
            team.end()


def describe(results: dict[str, Result]) -> str:
    """Return the table of what came of the types, and the lists of them, in Markdown."""
    import torch
    import transformers

    counted = Counter(result.outcome for result in results.values())
    rows = [[outcome, meaning, str(counted[outcome])] for outcome, meaning in MEANINGS.items() if counted[outcome]]
    head = f"""Tried on {datetime.now(UTC):%Y-%m-%d} with transformers {transformers.__version__} and torch
        {torch.__version__}: a small model of each type, with random weights, sharded over {RANKS} ranks."""
    parts = [paragraph(head), table([["result", "meaning", "types"], *rows]), ""]
    parts += [
        paragraph(f"- {result.outcome.capitalize()}: `{name}`: {result.reason}")
        for outcome in (DIFFERENT, REFUSED, FAILED)
        for name, result in results.items()
        if result.outcome == outcome
    ]
    reasons: dict[str, list[str]] = {}
    for name, result in results.items():
        if result.outcome == NOT_BUILT:
            kind, _, detail = result.reason.partition(": ")
            reasons.setdefault(kind, []).append(f"`{name}` ({detail})" if kind == BROKEN else f"`{name}`")
    parts += [paragraph(f"Not built ({reason}): {', '.join(names)}.") for reason, names in sorted(reasons.items())]
    equal = [name for name, result in results.items() if result.outcome == EQUAL]
    listed = ", ".join(f"`{name}`" for name in equal)
    return "\n".join([*parts, *([paragraph(f"Equal: {listed}.")] if equal else [])])


if __name__ == "__main__":
    main()
