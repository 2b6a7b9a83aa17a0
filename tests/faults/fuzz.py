"""Fuzz: every parser on input that nobody would write, for as long as one likes. Case 62.

`FAULTS_FUZZ_SECONDS` is the time for each parser: a minute or so before a change goes in, half an hour at night.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.faults.cases import Case, Seen
from tests.faults.parsers import PARSERS, Parser
from tests.faults.verdicts import Verdict

_SECONDS = int(os.environ.get("FAULTS_FUZZ_SECONDS", "10"))
_CULPRITS = {"timeout-": Verdict.HANG, "oom-": Verdict.BLOATED, "crash-": Verdict.TRACEBACK}


def fuzz(parser: Parser, place: Path, whole: bool) -> Iterator[Seen]:
    """Let atheris try a parser; only in the whole matrix, and where there is an atheris."""
    if not whole or find_spec("atheris") is None:
        return
    corpus, beside = place / "corpus", place / "beside"
    corpus.mkdir()
    beside.mkdir()
    parser.lay(beside)
    for i, seed in enumerate([*parser.seeds(), *parser.found]):
        (corpus / f"seed-{i}").write_bytes(seed)
    command = [sys.executable, "-m", "tests.faults.fuzzing", parser.name, str(_SECONDS), str(corpus), str(beside)]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS + 120)
    said = ended.stderr.decode(errors="replace")
    runs = re.search(r"number_of_executed_units: *(\d+)", said)
    culprit = next((path for path in sorted(corpus.iterdir()) if path.name.startswith("culprit-")), None)
    if culprit is None and ended.returncode == 0 and runs is not None:
        yield Seen(f"ckptkit {parser.name}", Verdict.RIGHT, f"{runs[1]} inputs")
        return
    kind = "crash-" if culprit is None else culprit.name.removeprefix("culprit-")
    verdict = next((found for name, found in _CULPRITS.items() if kind.startswith(name)), Verdict.TRACEBACK)
    content = "" if culprit is None else culprit.read_bytes()[:200]
    yield Seen(f"ckptkit {parser.name}", verdict, f"{content!r}\n{said[-2000:]}")


def case_of(parser: Parser) -> Callable[[Path, bool], Iterator[Seen]]:
    """How to run the case of a parser."""
    return partial(fuzz, parser)


CASES: tuple[Case, ...] = tuple(Case("62", "fuzz", parser.name, case_of(parser)) for parser in PARSERS)
