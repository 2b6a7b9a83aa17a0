"""Measure merging the files of ranks beside a merger that loads all of them. Imports no torch: see `__main__`."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.workplace import make, size_of, workplace
from scripts.markdown import paragraph

RANKS = 4
INPUTS = "scripts.benchmarks.rank_files_inputs"
MERGE = f"python -m {INPUTS} merge {{src}} {{out}}/model"


def rank_files(size_gb: float, runs: int) -> None:
    """Measure making a model of a file of torch.save for each rank, as verl's FSDP leaves them."""
    with workplace() as home:
        src = home / "actor"
        make(RANKS, f"save --size-gb {size_gb}", src, INPUTS)
        results = measure(contenders(src), home / "out", runs=runs, modes=("warm",))
        size = size_of(src)
    print(
        paragraph(
            f"""{size} (fp32) of {RANKS} ranks; medians of {runs} runs, taken in turns. In brackets: times what a merger
            took that loads the files of all ranks and joins each tensor, as verl's does, but keeps fp32. Peak RSS of
            the largest process."""
        )
    )
    print(table(results))


def contenders(src: Path) -> list[Contender]:
    """Return the merger, and ckptkit doing the same, with and without waiting for the disk."""
    name = "torch.load of all ranks"
    options = {"": "", ", no sync": " --no-sync"}
    return [
        Contender(name, MERGE, src, name),
        *(
            Contender(f"ckptkit consolidate{word}", f"ckptkit consolidate {{src}} {{out}}/model{flag}", src, name)
            for word, flag in options.items()
        ),
    ]
