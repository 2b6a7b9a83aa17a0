"""Resharding beside `cat`, and beside torch in as many processes. Imports no torch, see `scripts.bench`."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.bench_place import floors, make, size_of, torchrun, workplace
from scripts.bench_runs import Contender, measure, paragraph, table

RANKS = 16
DTYPE = "float32"


def reshard(size_gb: float, runs: int) -> None:
    """An 8-rank checkpoint with AdamW's state, made one for 16 ranks. Takes about 5 minutes."""
    with workplace() as home:
        src = home / "src"
        make(8, f"training --size-gb {size_gb} --dtype {DTYPE}", src)
        peer = f"{torchrun(RANKS)} scripts.bench_ranks reshard {{src}} {{out}} --size-gb {size_gb} --dtype {DTYPE}"
        results = measure(
            [
                *floors(DTYPE, src),
                ours(src),
                ours(src, " --no-sync"),
                Contender(f"dcp.load + dcp.save, {RANKS} processes", peer, src, f"{DTYPE}: cat, sync", tells=True),
            ],
            home / "out",
            runs=runs,
            modes=("warm",),
        )
        nbytes = size_of(src)
    print(
        paragraph(
            f"""{nbytes / 1e9:.2f} GB from 8 ranks to {RANKS}, on {os.cpu_count()} cores; medians of {runs} runs, taken
            in turns. In brackets: times what cat took, with sync where the program syncs. Of ckptkit the whole command
            counts; of torch the two calls alone, not the start of its processes, and its memory is the sum over these,
            libraries counted in each."""
        )
    )
    print(table(results))


def ours(src: Path, options: str = "") -> Contender:
    """`ckptkit reshard`, held against the floor that makes the same promise."""
    floor = f"{DTYPE}: cat" if options else f"{DTYPE}: cat, sync"
    command = f"ckptkit reshard {{src}} {{out}}/new --to {RANKS}{options}"
    return Contender(f"ckptkit reshard{options}", command, src, floor)
