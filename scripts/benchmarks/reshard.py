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
            f"""{size} (fp32 model and AdamW's state) from 8 ranks to {TO}; medians of {runs} runs, warm. The time of
            ckptkit is that of the whole command. The time of torch is that of the two calls, without the start of its
            processes. Its memory is the sum over the processes, with the libraries in each."""
        )
    )
    print(table(results))


def ours(src: Path, options: str = "") -> Contender:
    """Return `ckptkit reshard`, to be compared with the floor that makes the same promise."""
    floor = f"{DTYPE}: cat" if options else f"{DTYPE}: cat, sync"
    command = f"ckptkit reshard {{src}} {{out}}/new --to {TO}{options}"
    return Contender(f"ckptkit reshard{options}", command, src, floor)
