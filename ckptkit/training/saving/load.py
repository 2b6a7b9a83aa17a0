"""Load a state that was saved in any form, by all ranks: first its outline, and then what is wanted of it.

A directory of DCP's or a Hugging Face model is read shard by shard, through `ckptkit.storage`. A file of torch.save is
read by rank 0 for all: only there is what is nested in it exactly what it was.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict_loader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.checkpoints.trainers.ckptkit import TRAINING
from ckptkit.errors import Corrupt, Unsupported, translate_os_errors
from ckptkit.layout import Spec
from ckptkit.ops.verify import verify_part
from ckptkit.storage import Reader
from ckptkit.storage.ranks import Ranks, translate
from ckptkit.training.saving.save import MODEL, unwrap
from ckptkit.training.saving.scatter import scatter
from ckptkit.training.saving.trees import Tree, outlined

FILE = "state.pt"


class Stored:
    """The state in the checkpoint at `path`, whatever its form."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path = path
        self._ranks = ranks
        is_model, file = ranks.on_first(lambda: find_form(path))
        self._reader = None if file == path / FILE else Reader(path, under=MODEL if is_model else "")
        self._file = file
        self._in_file: Tree = {}  # on rank 0; its tensors are the file, mapped to memory

    def outline(self) -> Tree:
        """Return the state without its data: tensors have a shape and a dtype, all else of a directory is None."""
        return self._ranks.on_first(self._outline)

    def _outline(self) -> Tree:
        outline: Tree = {}
        if self._reader is not None:
            outline = read_outline(self._reader)
        if self._file is not None:
            # a sharded checkpoint that was made into one file has its dicts wrapped still
            self._in_file = {name: unwrap(part) for name, part in read_file(self._file).items()}
            outline |= outlined(self._in_file)
        return outline

    def read(self, wanted: Tree) -> None:
        """Read into `wanted`, which is all or some of the outline, every rank its own shards."""
        in_file = self._ranks.on_first(lambda: set(self._in_file))
        self._fill({name: part for name, part in wanted.items() if name in in_file}, self._in_file)
        self._in_file = {}
        if self._reader is not None:
            wanted |= self._read({name: part for name, part in wanted.items() if name not in in_file}, self._reader)

    def _read(self, wanted: Tree, reader: Reader) -> Tree:
        # Otherwise a rank without a shard of one of FSDP1's tensors takes the checkpoint for one of torch 2.3 (2.13).
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        try:
            state_dict_loader.load(wanted, storage_reader=reader, planner=planner, process_group=self._ranks.group)
        except CheckpointException as error:
            raise translate(error, self.path, "load") from error
        return {name: unwrap(part) for name, part in wanted.items()}

    def _fill(self, wanted: Any, stored: Any) -> None:
        """Send each tensor of the file to all ranks, which cut their shards from it."""
        is_first = self._ranks.rank == 0
        if isinstance(wanted, Tensor):
            whole = stored if is_first else torch.empty(wanted.shape, dtype=wanted.dtype)
            scatter(broadcast(whole, self._ranks), wanted)
        elif isinstance(wanted, dict | list):
            for key, value in wanted.items() if isinstance(wanted, dict) else enumerate(wanted):
                self._fill(value, stored[key] if is_first else None)


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
        raise Unsupported("saved without the names of what is nested in it", path=reader.path)
    return unflatten_state_dict(leaves, keys)


def without_data(spec: Spec) -> Tensor:
    """Return a tensor of a shape and a dtype without memory."""
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


def broadcast(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return the tensor that rank 0 has, on the CPU of every rank; the others give one to receive it in."""
    if ranks.group is not None and tensor.numel():
        tensor = tensor.contiguous()
        dist.broadcast(tensor.view(-1).view(torch.uint8), group_src=0, group=ranks.group)  # gloo knows few dtypes
    return tensor
