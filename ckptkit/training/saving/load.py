"""Load a state of any form on all ranks: first its outline, then the wanted entries.

Tensors are read shard by shard, through `ckptkit.storage`. What else is in a file of torch.save is read by rank 0 for
all, with torch: only there is what is nested in it exactly what it was.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, clone
from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.checks.verify import verify_part
from ckptkit.errors import Corrupt, Unsupported, translate_os_errors
from ckptkit.layout import Spec
from ckptkit.storage import Reader
from ckptkit.storage.ranks import Ranks, translate
from ckptkit.trainers.ckptkit import TRAINING
from ckptkit.training.saving.save import IN_PARTS, MODEL, unwrap
from ckptkit.training.saving.state import Tree, flatten, map_tensors, outlined, unflatten

FILE = "state.pt"


class Stored:
    """The state in the checkpoint at `path`, whatever its form."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path = path
        self._ranks = ranks
        is_model, self._file = ranks.on_first(lambda: find_form(path))
        self._reader = Reader(path, under=MODEL if is_model else "", unasked="ignore")
        self._in_file: set[str] = set()

    def outline(self) -> Tree:
        """Return the state without its data: tensors have a shape and a dtype, all else of a directory is None.

        What a file of torch.save has besides model and optimizer is there already.
        """
        in_file, outline = self._ranks.on_first(self._outline)
        self._in_file = set(in_file)
        return outline | in_file

    def _outline(self) -> tuple[Tree, Tree]:
        # a sharded checkpoint that was made into one file has its dicts wrapped still
        state = {name: unwrap(part) for name, part in read_file(self._file).items()} if self._file else {}
        found = {name: outlined(part) if name in IN_PARTS else map_tensors(clone, part) for name, part in state.items()}
        return found, {} if self._file == self.path / FILE else read_outline(self._reader)

    def read(self, wanted: Tree) -> None:
        """Read into `wanted`, which is all or some of the outline, every rank its own shards."""
        state = {name: part for name, part in wanted.items() if name not in self._in_file}
        inside = {name: part for name, part in wanted.items() if name in self._in_file and name in IN_PARTS}
        # Otherwise a rank without a shard of one of FSDP1's tensors takes the checkpoint for one of torch 2.3 (2.13).
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        every = dict(flatten(inside)) | state
        try:
            state_dict_loader.load(every, storage_reader=self._reader, planner=planner, process_group=self._ranks.group)
        except CheckpointException as error:
            raise translate(error, self.path, "load") from error
        wanted |= {name: unwrap(every[name]) for name in state}


def find_form(path: Path) -> tuple[bool, Path | None]:
    """Return whether `path` is a model with the rest of its training beside it, and the file of torch.save in it."""
    files = (path / TRAINING / FILE, path / FILE)
    return (path / TRAINING).exists(), next((file for file in files if file.exists()), None)


def read_outline(reader: Reader) -> Tree:
    """Return the nested dicts that a checkpoint holds: tensors without data in them, and None for all else.

    Read by us and not by torch, which would run whatever code its metadata brings along.
    """
    leaves: dict[str, Tensor | None] = {}
    keys: dict[str, Any] = {}
    for layout in reader.open():
        leaves |= dict.fromkeys(layout.blobs) | {name: without_data(spec) for name, spec in layout.specs.items()}
        keys |= layout.keys
    if not keys:
        raise Unsupported("saved without the names of its nested entries", path=reader.path)
    return unflatten(leaves, keys)


def without_data(spec: Spec) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device="meta")


def read_file(path: Path) -> Tree:
    """Return the state in a file of torch.save: its tensors stay on the disk until they are used, no code of it runs.

    torch compares no checksums, so that is done before.
    """
    problem = next(iter(verify_part(path).problems), None)
    if problem is not None:
        raise problem
    with translate_os_errors(path):
        try:
            state: Tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise Corrupt(f"torch cannot load it: {str(error).splitlines()[0]}", path=path) from error
    return state
