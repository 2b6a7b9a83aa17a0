"""Find the directories of ranks that share tensors, pipeline and experts, and tell by their names which is which.

Source: megatron/training/checkpointing.py, get_checkpoint_name: `mp_rank_TT`, `mp_rank_TT_PPP` with several stages of a
pipeline, and at the end the number of the rank of experts, if there are several of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import ELSEWHERE, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.io.file import is_there, names_in

FILES = ("model_optim_rng.pt", "model_rng.pt")
BUFFERS = "distrib_optim.pt"  # of the optimizer that data-parallel ranks share
_MOST = 1 << 12  # ranks that are missing
_RANK = re.compile(r"mp_rank_([0-9]{2,4})((?:_[0-9]{3,4}){0,2})")


class GridSizes(NamedTuple):
    """The numbers of ranks that share tensors, of stages of the pipeline, and of ranks that share experts."""

    tensor: int
    stages: int
    experts: int


class Rank(NamedTuple):
    """The place of a rank among those that share tensors, in the pipeline, and among those that share experts."""

    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory of a rank, with the numbers in its name."""

    name: str
    numbers: tuple[int, ...]


def find_directories(names: Iterable[str]) -> list[Directory]:
    """Return those of the names that are directories of ranks, in order."""
    matches = ((name, _RANK.fullmatch(name)) for name in names)
    found = [
        Directory(name, (int(match[1]), *(int(n) for n in match[2].split("_") if n)))
        for name, match in matches
        if match
    ]
    return sorted(found, key=lambda directory: directory.numbers)


def file_in(root: Path, directory: str, report: Report) -> str:
    """Return the file of a rank, as seen from `root`. Reports a directory that has none."""
    names = names_in(root / directory)
    found = next((name for name in FILES if name in names), None)
    if found is None:
        report(
            Incomplete(
                f"`{FILES[0]}` is missing from the directory of this rank", path=root / directory, hint=ELSEWHERE
            )
        )
    return f"{directory}/{found or FILES[0]}"


def has_rank(path: Path) -> bool:
    """Return whether a directory is that of one rank, with its file in it."""
    return path.is_dir() and any(is_there(path / name) for name in FILES)


def place(
    root: Path, directories: Iterable[Directory], sizes: GridSizes | None, has_stages: bool, report: Report
) -> Mapping[Rank, str]:
    """Return the directory of each rank; `sizes` as the ranks were told, None where their files do not say.

    Of two numbers the second is that of a stage if `has_stages`. Reports ranks that have none. Raises `Corrupt` for
    those of several jobs.
    """
    found = {as_rank(directory.numbers, has_stages): directory.name for directory in directories}
    lengths = {len(directory.numbers) for directory in directories}
    if len(lengths) > 1:
        raise Corrupt("this directory mixes the ranks of several jobs: their names differ in length", path=root)
    sizes = sizes or GridSizes(*(1 + max(numbers) for numbers in zip(*found, strict=True)))
    more = sorted(rank for rank in found if not all(number < size for number, size in zip(rank, sizes, strict=True)))
    count = prod(sizes) - (len(found) - len(more))
    length = max(*lengths, 1 + (sizes.stages > 1) + (sizes.experts > 1))
    tensors, stages, experts = map(range, sizes)  # as many as somebody's file says
    ranks = (Rank(i, j, k) for i in tensors for j in stages for k in experts)
    missing = {rank: name_of(rank, length, has_stages) for rank in islice((r for r in ranks if r not in found), _MOST)}
    if count:
        names = ", ".join(islice(missing.values(), 8))
        problem = Incomplete(
            f"the files of {count} of {prod(sizes)} ranks are missing: {names}", path=root, hint=ELSEWHERE
        )
        (report if count <= _MOST else refuse)(problem)
    if more:
        names = ", ".join(found[rank] for rank in more[:8])
        shape = f"{sizes.tensor} x {sizes.stages} x {sizes.experts}"
        hint = "move the files of the other job to another directory"
        raise Corrupt(f"expected {shape} ranks, as the files say, found these too: {names}", path=root, hint=hint)
    return found | missing


def as_rank(numbers: tuple[int, ...], has_stages: bool) -> Rank:
    """Return the rank with these numbers in the name of its directory."""
    match numbers:
        case (tensor,):
            return Rank(tensor, 0, 0)
        case (tensor, other):
            return Rank(tensor, other, 0) if has_stages else Rank(tensor, 0, other)
        case (tensor, stage, expert):
            return Rank(tensor, stage, expert)
    raise Unsupported(f"expected 1 to 3 numbers in the name of a rank's directory, found {len(numbers)}")


def name_of(rank: Rank, length: int, has_stages: bool) -> str:
    """Return the name of the directory of a rank, in a checkpoint with so many numbers in each."""
    more = {1: (), 2: (rank.stage if has_stages else rank.expert,), 3: (rank.stage, rank.expert)}[length]
    return f"mp_rank_{rank.tensor:02d}" + "".join(f"_{number:03d}" for number in more)
