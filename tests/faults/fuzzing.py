"""Fuzzing: one parser fed by atheris with what new ways through its code suggest.

A program: PARSER SECONDS CORPUS PLACE. Ends with a status other than 0 when a parser does, hangs or takes too much
memory; the input then lies in the corpus.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckptkit"]):
    from tests.faults.parsers import PARSERS, is_total

_MOST_BYTES = 1 << 14
_SECONDS, _MEGABYTES = 10, 1024  # for one input


def main() -> None:
    """Parse the command line and fuzz."""
    name, seconds, corpus, place = sys.argv[1:]
    parser = next(parser for parser in PARSERS if parser.name == name)
    options = {
        "max_total_time": seconds,
        "max_len": _MOST_BYTES,
        "timeout": _SECONDS,
        "rss_limit_mb": _MEGABYTES,
        "artifact_prefix": f"{corpus}/culprit-",
        "print_final_stats": 1,
        "verbosity": 0,
        "seed": 1,
    }
    atheris.Setup(
        ["fuzzing", *(f"-{option}={value}" for option, value in options.items()), corpus],
        lambda data: is_total(parser, data, Path(place)),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
