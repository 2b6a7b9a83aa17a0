"""Name the files of a DCP directory: `.metadata`, or that of every rank, and the data.

Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.errors import ELSEWHERE, Incomplete
from ckptkit.files.file import names_in

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r".*?__(\d+)_\d+\.distcp")


def name_data(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def rank_of(name: str) -> int | None:
    """Return the rank that wrote a file of data, None for any other file."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def is_metadata(name: str) -> bool:
    """Return whether a file describes the checkpoint, or what one rank has of it."""
    return name == METADATA or bool(_RANK_METADATA.fullmatch(name))


def find_metadata(path: Path) -> list[Path]:
    """Return the files that describe the checkpoint: `.metadata`, or else every rank's own, in order of rank.

    Raises `Corrupt` if there is neither.
    """
    if (path / METADATA).exists():
        return [path / METADATA]
    ranks = {int(match[1]): path / name for name in names_in(path) if (match := _RANK_METADATA.fullmatch(name))}
    if not ranks:
        raise Incomplete(
            "no `.metadata`: the save did not finish",
            path=path,
            hint=f"use an older checkpoint, or its metadata with --salvage --fill-from OLDER; {ELSEWHERE}",
        )
    return [ranks[rank] for rank in sorted(ranks)]
