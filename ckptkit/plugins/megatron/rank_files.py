"""Read the files of Megatron's ranks.

Rank directories by their names, and the arguments, model, optimizer and other entries in each file.
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

from ckptkit.errors import ELSEWHERE, Corrupt, Incomplete, Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import FlatState, Flattening, find_dict_items
from ckptkit.formats.archives.torch_save import StateFile, read_state_file
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.shards.join import as_unreadable_tensors
from ckptkit.io.file import is_existing_path, names_in
from ckptkit.layout import Spec, StoredTensor

# Find the directories of tensor-, pipeline- and expert-parallel ranks, and parse their names.
#
# Source: megatron/training/checkpointing.py, get_checkpoint_name: `mp_rank_TT`, `mp_rank_TT_PPP` with several pipeline
# stages, and at the end the expert-parallel rank, if there are several.
FILES = ("model_optim_rng.pt", "model_rng.pt")
BUFFERS = "distrib_optim.pt"  # the optimizer state that data-parallel ranks share
_MOST = 1 << 12  # reported missing ranks
_RANK = re.compile(r"mp_rank_([0-9]{2,4})((?:_[0-9]{3,4}){0,2})")


class GridSizes(NamedTuple):
    """The number of tensor-parallel ranks, pipeline stages, and expert-parallel ranks."""

    tensor: int
    stages: int
    experts: int


class Rank(NamedTuple):
    """The tensor-parallel, pipeline and expert-parallel index of a rank."""

    tensor: int
    stage: int
    expert: int


def find_rank_directories(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the rank directories among the names, with the numbers in their names, sorted by these."""
    matches = filter(None, map(_RANK.fullmatch, names))
    directories = {match[0]: (int(match[1]), *(int(n) for n in match[2].split("_") if n)) for match in matches}
    return dict(sorted(directories.items(), key=lambda directory: directory[1]))


def require_rank_file(root: Path, directory: str, report: Report) -> str:
    """Return the file of a rank, relative to `root`. Reports a directory without a file."""
    names = names_in(root / directory)
    file_name = next((name for name in FILES if name in names), None)
    if file_name is None:
        message = f"`{FILES[0]}` is missing from the directory of this rank"
        report(Incomplete(message, path=root / directory, hint=ELSEWHERE))
    return f"{directory}/{file_name or FILES[0]}"


def is_rank_directory(path: Path) -> bool:
    """Return whether a directory belongs to one rank and contains its file."""
    return path.is_dir() and any(is_existing_path(path / name) for name in FILES)


def directory_names_by_rank(
    root: Path,
    directories: Mapping[str, tuple[int, ...]],
    grid_sizes: GridSizes | None,
    has_stages: bool,
    report: Report,
) -> Mapping[Rank, str]:
    """Return the directory name of each rank; `grid_sizes` come from the arguments, None if nothing records them.

    With two numbers in a name, the second is the pipeline stage if `has_stages`, else the expert-parallel rank. Reports
    ranks without a directory. Raises `Corrupt` for directories of several jobs.
    """
    names_by_rank = {parse_rank(numbers, has_stages): name for name, numbers in directories.items()}
    lengths = set(map(len, directories.values()))
    if len(lengths) > 1:
        raise Corrupt("this directory mixes the ranks of several jobs: their names differ in length", path=root)
    grid_sizes = grid_sizes or GridSizes(*(1 + max(numbers) for numbers in zip(*names_by_rank, strict=True)))
    unexpected = sorted(
        rank for rank in names_by_rank if not all(number < size for number, size in zip(rank, grid_sizes, strict=True))
    )
    missing_count = prod(grid_sizes) - (len(names_by_rank) - len(unexpected))
    length = max(*lengths, 1 + (grid_sizes.stages > 1) + (grid_sizes.experts > 1))
    tensors, stages, experts = map(range, grid_sizes)  # sizes recorded in a readable file
    ranks = (Rank(i, j, k) for i in tensors for j in stages for k in experts)
    missing = {}
    for rank in islice((rank for rank in ranks if rank not in names_by_rank), _MOST):
        further = {1: (), 2: (rank.stage if has_stages else rank.expert,), 3: (rank.stage, rank.expert)}[length]
        missing[rank] = f"mp_rank_{rank.tensor:02d}" + "".join(f"_{number:03d}" for number in further)
    if missing_count:
        names = ", ".join(islice(missing.values(), 8))
        message = f"the files of {missing_count} of {prod(grid_sizes)} ranks are missing: {names}"
        problem = Incomplete(message, path=root, hint=ELSEWHERE)
        (report if missing_count <= _MOST else raise_problem)(problem)
    if unexpected:
        names = ", ".join(names_by_rank[rank] for rank in unexpected[:8])
        shape = f"{grid_sizes.tensor} x {grid_sizes.stages} x {grid_sizes.experts}"
        hint = "move the files of the other job to another directory"
        raise Corrupt(f"expected {shape} ranks, as the files say, found these too: {names}", path=root, hint=hint)
    return names_by_rank | missing


def parse_rank(numbers: tuple[int, ...], has_stages: bool) -> Rank:
    match numbers:
        case (tensor,):
            return Rank(tensor, 0, 0)
        case (tensor, other):
            return Rank(tensor, other, 0) if has_stages else Rank(tensor, 0, other)
        case (tensor, stage, expert):
            return Rank(tensor, stage, expert)
    raise Unsupported(f"expected 1 to 3 numbers in the name of a rank's directory, found {len(numbers)}")


_MODEL = re.compile(r"model([0-9]{0,3})")
OPTIMIZER = "optimizer"
VERSION = "checkpoint_version"
_LARGEST = 1 << 60
_STATE = "_extra_state"  # of Transformer Engine's layers: each rank has its own
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True)
class SavedRank:
    """The file `path` of a rank, relative to directory `root`.

    If `is_lost`, the file is unreadable and `state` comes from another rank of the same stage: same shapes, unreadable
    chunks.
    """

    root: Path
    path: str
    state: StateFile
    is_lost: bool = False

    @classmethod
    def read(cls, root: Path, path: str) -> SavedRank:
        """Read the file of a rank without running its pickle. Raises `Corrupt` if it contains no model."""
        saved = cls(root, path, read_state_file(root, path))
        if not any(_MODEL.fullmatch(key) for key in saved.entries):
            raise Corrupt("the file has no `model`", path=root / path)
        return saved

    @cached_property
    def entries(self) -> Mapping[str, Any]:
        pairs = find_dict_items(self.state.value)
        if pairs is None:
            raise Corrupt("the file does not contain a dict", path=self.root / self.path)
        return {str(key): value for key, value in pairs}

    @cached_property
    def job_arguments(self) -> Mapping[str, Any]:
        """Return the numeric and boolean arguments of the job by name; {} without saved arguments."""
        saved = self.entries.get("args")
        try:
            pairs = saved.attributes().items() if isinstance(saved, Record) else find_dict_items(saved) or ()
        except (TypeError, ValueError):
            pairs = ()
        return {str(name): value for name, value in pairs if is_number_of_plausible_size(value)}

    def find_number(self, key: str) -> int | float | None:
        """Return the number under a key; None if there is none."""
        value = self.entries.get(key)
        return value if is_number_of_plausible_size(value) else None

    @property
    def find_grid_sizes(self) -> GridSizes | None:
        """Return the number of ranks of each kind; None if the arguments do not record them."""
        tensor, stages, experts = (self.job_arguments.get(name) for name in _SIZES)
        if type(tensor) is not int or type(stages) is not int:
            return None
        sizes = GridSizes(tensor, stages, experts if type(experts) is int else 1)
        if min(sizes) < 1:
            found = " x ".join(map(str, sizes))
            raise Corrupt(f"expected at least 1 rank along each axis, found {found}", path=self.root / self.path)
        return sizes

    @cached_property
    def models_by_virtual_stage(self) -> Mapping[int, FlatState]:
        """Return the tensors and entries of the model by run of layers (0 if there is only one)."""
        key_of_run = {int(match[1] or 0): key for key in self.entries if (match := _MODEL.fullmatch(key))}
        return {run: self.flatten(self.entries[key]) for run, key in sorted(key_of_run.items())}

    @cached_property
    def weights(self) -> Mapping[int, Mapping[str, StoredTensor]]:
        """Return the model tensors by run, without per-rank layer state."""
        return {
            run: {name: tensor for name, tensor in flat.tensors.items() if not is_per_rank_layer_state(name)}
            for run, flat in self.models_by_virtual_stage.items()
        }

    def specs(self, virtual_stage: int) -> Mapping[str, Spec]:
        return {name: tensor.spec for name, tensor in self.weights[virtual_stage].items()}

    @property
    def other_entries(self) -> Mapping[str, Any]:
        return {key: value for key, value in self.entries.items() if not (_MODEL.fullmatch(key) or key == OPTIMIZER)}

    def flatten(self, value: Any) -> FlatState:
        """Return all tensors and entries inside a value of the file."""
        flattening = Flattening(self.state.entries, self.path)
        with errors_at(path=self.root / self.path):
            flattening.add_nested(value, ())
        return as_unreadable_tensors(flattening.flat, self.path) if self.is_lost else flattening.flat


def is_number_of_plausible_size(value: object) -> TypeGuard[int | float]:
    """Return whether a pickled value is a number or bool of plausible size."""
    return type(value) in (bool, int, float) and abs(value) < _LARGEST  # type: ignore[arg-type]


def is_per_rank_layer_state(name: str) -> bool:
    """Return whether a model entry is the per-rank state of a layer, not a weight."""
    return name.endswith(_STATE)
