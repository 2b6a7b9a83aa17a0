"""The files of Megatron's ranks.

The directories by their names, and the arguments, model, optimizer and other entries in each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ckptkit.errors import ELSEWHERE, CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.formats.archives.flatten import FlatState, Flattening, pairs_of
from ckptkit.formats.archives.state_files import StateFile, read_state_file
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.shards.join_ranks import as_lost
from ckptkit.io.file import is_there, names_in
from ckptkit.layout import Spec, StoredTensor

# Find the directories of ranks that share tensors, pipeline and experts, and tell by their names which is which.
#
# Source: megatron/training/checkpointing.py, get_checkpoint_name: `mp_rank_TT`, `mp_rank_TT_PPP` with several stages of
# a pipeline, and at the end the number of the rank of experts, if there are several of these.
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


_MODEL = re.compile(r"model([0-9]{0,3})")
OPTIMIZER = "optimizer"
VERSION = "checkpoint_version"
_LARGEST = 1 << 60
_STATE = "_extra_state"  # of Transformer Engine's layers: each rank has its own
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True)
class SavedRank:
    """The file `path` of a rank, as seen from directory `root`.

    Of one that `is_lost` the `state` is that of another rank of its stage: its tensors are as large, and unreadable.
    """

    root: Path
    path: str
    state: StateFile
    is_lost: bool = False

    @classmethod
    def read(cls, root: Path, path: str) -> SavedRank:
        """Read a rank's file inertly. Raises `Corrupt` if there is no model in it."""
        saved = cls(root, path, read_state_file(root, path))
        if not any(_MODEL.fullmatch(key) for key in saved.entries):
            raise Corrupt("the file has no `model`", path=root / path)
        return saved

    @cached_property
    def entries(self) -> Mapping[str, Any]:
        """Return what it holds, by key."""
        pairs = pairs_of(self.state.value)
        if pairs is None:
            raise Corrupt("the file does not contain a dict", path=self.root / self.path)
        return {str(key): value for key, value in pairs}

    @cached_property
    def args(self) -> Mapping[str, Any]:
        """Return those of the arguments of the job that are numbers or switches, by name; {} where there are none."""
        found = self.entries.get("args")
        try:
            pairs = found.attributes().items() if isinstance(found, Record) else pairs_of(found) or ()
        except (TypeError, ValueError):
            pairs = ()
        return {str(name): value for name, value in pairs if is_number(value)}

    def number(self, key: str) -> int | float | None:
        """Return a number that it holds, None if there is none under this key."""
        found = self.entries.get(key)
        return found if is_number(found) else None

    @property
    def sizes(self) -> GridSizes | None:
        """Return how many ranks there are of each kind, None where the arguments do not say."""
        tensor, stages, experts = (self.args.get(name) for name in _SIZES)
        if type(tensor) is not int or type(stages) is not int:
            return None
        sizes = GridSizes(tensor, stages, experts if type(experts) is int else 1)
        if min(sizes) < 1:
            raise Corrupt(
                f"expected at least 1 rank along each axis, found {' x '.join(map(str, sizes))}",
                path=self.root / self.path,
            )
        return sizes

    @cached_property
    def models(self) -> Mapping[int, FlatState]:
        """Return the tensors and entries of the model, or of each run of layers that this rank has, by name."""
        found = {int(match[1] or 0): key for key in self.entries if (match := _MODEL.fullmatch(key))}
        return {run: self.flatten(self.entries[key]) for run, key in sorted(found.items())}

    @cached_property
    def weights(self) -> Mapping[int, Mapping[str, StoredTensor]]:
        """Return the tensors of the model by run, without those that are the state of this rank's layers."""
        return {
            run: {name: tensor for name, tensor in flat.tensors.items() if not is_own_state(name)}
            for run, flat in self.models.items()
        }

    def specs(self, run: int) -> Mapping[str, Spec]:
        """Return the dtype and shape of each tensor of the model."""
        return {name: tensor.spec for name, tensor in self.weights[run].items()}

    @property
    def others(self) -> Mapping[str, Any]:
        return {key: value for key, value in self.entries.items() if not (_MODEL.fullmatch(key) or key == OPTIMIZER)}

    def flatten(self, value: Any) -> FlatState:
        """Return the tensors and entries in a part of what it holds."""
        flattening = Flattening(self.state.entries, self.path)
        try:
            flattening.add(value, ())
        except CkptError as error:
            raise error.blame(path=self.root / self.path) from None
        return as_lost(flattening.flat, self.path) if self.is_lost else flattening.flat


def check_arguments(saved: SavedRank, sizes: GridSizes) -> None:
    """Raise `Unsupported` for ways to split a model of which the names of the directories do not tell all."""
    args, path = saved.args, saved.root / saved.path
    groups = args.get("num_query_groups")
    if args.get("group_query_attention") and isinstance(groups, int) and groups < sizes.tensor:
        raise Unsupported(
            f"expected at least {sizes.tensor} groups of queries, one for each rank, found {groups}", path=path
        )
    expert_ranks = args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and isinstance(expert_ranks, int) and expert_ranks != sizes.tensor:
        message = f"expected experts split over {sizes.tensor} ranks like the other tensors, found {expert_ranks}"
        raise Unsupported(message, path=path)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether something in a pickle is a number or a switch, and no longer than one of any use."""
    return type(value) in (bool, int, float) and abs(value) < _LARGEST  # type: ignore[arg-type]


def is_own_state(name: str) -> bool:
    """Return whether an entry of a model is no weight but the state of one rank's layer."""
    return name.endswith(_STATE)
