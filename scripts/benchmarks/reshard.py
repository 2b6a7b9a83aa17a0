"""Measure resharding beside `cat`, and beside torch in as many processes. Imports no torch: see `__main__`."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.storage import ranks
from scripts.benchmarks.workplace import floors, make, size_of, workplace
from scripts.markdown import paragraph

TO = 16
DTYPE = "float32"


def reshard(size_gb: float, runs: int) -> None:
    """Measure making an 8-rank checkpoint with AdamW's state one for 16 ranks. Takes about 5 minutes."""
    with workplace() as home:
        src = home / "src"
        make(8, f"training --size-gb {size_gb} --dtype {DTYPE}", src)
        peer = f"{ranks('reshard', TO, size_gb, DTYPE)} {{src}} {{out}}"
        results = measure(
            [
                *floors(DTYPE, src),
                ours(src),
                ours(src, " --no-sync"),
                Contender(f"dcp.load + dcp.save, {TO} processes", peer, src, f"{DTYPE}: cat, sync", tells=True),
            ],
            home / "out",
            runs=runs,
            modes=("warm",),
        )
        size = size_of(src)
    print(
        paragraph(
            f"""{size} (fp32 model and AdamW's state) from 8 ranks to {TO}; medians of {runs} runs, taken in turns, with
            the input in the page cache. In brackets: times what cat took, with sync where the program syncs. Of ckptkit
            the whole command counts; of torch the two calls alone, not the start of its processes, and its memory is
            the sum over these, libraries counted in each."""
        )
    )
    print(table(results))


def ours(src: Path, options: str = "") -> Contender:
    """Return `ckptkit reshard`, to be compared with the floor that makes the same promise."""
    floor = f"{DTYPE}: cat" if options else f"{DTYPE}: cat, sync"
    command = f"ckptkit reshard {{src}} {{out}}/new --to {TO}{options}"
    return Contender(f"ckptkit reshard{options}", command, src, floor)
