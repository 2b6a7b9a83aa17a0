"""Make the files of ranks, and a merger that loads all of them, for the benchmark of trainers. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.runs import Contender
from scripts.benchmarks.workplace import make

RANKS = 4
INPUTS = "scripts.benchmarks.rank_files_inputs"
MERGE = f"python -m {INPUTS} merge {{src}} {{out}}/model"


def save_rank_files(home: Path, size_gb: float) -> Path:
    """Save a model in a file for each rank, as verl's FSDP2 leaves them; return their directory."""
    make(RANKS, f"save --size-gb {size_gb}", home / "actor", INPUTS)
    return home / "actor"


def contenders(src: Path) -> list[Contender]:
    """Return the merger, and ckptkit doing the same, with and without waiting for the disk."""
    name = "files by rank: torch.load of all"
    options = {"": "", ", no sync": " --no-sync"}
    return [
        Contender(name, MERGE, src, name),
        *(
            Contender(
                f"files by rank: ckptkit consolidate{word}",
                f"ckptkit consolidate {{src}} {{out}}/model{flag}",
                src,
                name,
            )
            for word, flag in options.items()
        ),
    ]
