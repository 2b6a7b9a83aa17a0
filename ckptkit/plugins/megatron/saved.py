"""One rank's file of torch.save: its arguments, model, optimizer and other entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.archives.flatten import FlatState, Flattening, pairs_of
from ckptkit.formats.archives.state_files import StateFile, read_state_file
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.formats.shards.join_ranks import as_lost
from ckptkit.layout import Spec, StoredTensor
from ckptkit.plugins.megatron.grid import GridSizes

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
