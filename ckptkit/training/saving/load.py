"""Load a state of any `state_dict` format on all ranks: first its outline, then the requested entries.

Each rank reads its shards of the tensors through `ckptkit.storage`. Rank 0 reads the non-tensor entries of a torch.save
file with torch and sends them to all ranks, because only torch restores nested Python objects exactly.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, clone
from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.checks.verify import verify_component
from ckptkit.errors import Corrupt, Unsupported, translate_os_errors
from ckptkit.storage import Reader
from ckptkit.storage.ranks import Ranks, to_rank_error
from ckptkit.trainers.ckptkit import TRAINING
from ckptkit.training.saving.save import IN_PARTS, MODEL, unwrap_dict_from_tuple
from ckptkit.training.saving.state import Tree, map_tensors, nest_leaves, tensors_by_dotted_key

FILE = "state.pt"


class Stored:
    """The state in the checkpoint at `path`, in any format that `Run` writes."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path = path
        self._ranks = ranks
        files = (path / TRAINING / FILE, path / FILE)
        is_model, self._file = ranks.run_on_first_rank(
            lambda: ((path / TRAINING).exists(), next((file for file in files if file.exists()), None))
        )
        self._reader = Reader(path, under=MODEL if is_model else "", unasked="ignore")
        self._in_file: set[str] = set()

    def load_state_on_meta(self) -> Tree:
        """Return the state with meta tensors (shape and dtype, no data) in place of the stored tensors.

        Non-tensor entries of a checkpoint directory are None. Entries of a torch.save file other than model and
        optimizer are already loaded.
        """
        in_file, outline = self._ranks.run_on_first_rank(self._read_state_on_meta)
        self._in_file = set(in_file)
        return outline | in_file

    def _read_state_on_meta(self) -> tuple[Tree, Tree]:
        state: Tree = {}
        if self._file is not None:
            # torch does not verify checksums, so they are verified first
            problem = next(iter(verify_component(self._file).problems), None)
            if problem is not None:
                raise problem
            with translate_os_errors(self._file):
                try:  # tensors are mmapped, and no code in the file runs
                    loaded = torch.load(self._file, map_location="cpu", mmap=True, weights_only=True)
                except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                    raise Corrupt(f"torch cannot load it: {str(error).splitlines()[0]}", path=self._file) from error
            # a sharded checkpoint that was converted to one file still has its dicts wrapped in tuples
            state = {name: unwrap_dict_from_tuple(entry) for name, entry in loaded.items()}
        on_meta = partial(torch.empty_like, device="meta")
        outline = {name: map_tensors(on_meta if name in IN_PARTS else clone, entry) for name, entry in state.items()}
        if self._file == self.path / FILE:
            return outline, {}
        leaves: dict[str, Tensor | None] = {}
        keys: dict[str, Any] = {}
        # ckptkit parses the metadata itself, because torch would unpickle it and run any code in it
        for layout in self._reader.open():
            leaves |= dict.fromkeys(layout.blobs)
            for name, spec in layout.specs.items():
                leaves[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device="meta")
            keys |= layout.keys
        if not keys:
            raise Unsupported("saved without the names of its nested entries", path=self._reader.path)
        return outline, nest_leaves({keys[name]: leaf for name, leaf in leaves.items()})

    def read_into(self, wanted: Tree) -> None:
        """Fill `wanted`, a subset of the outline's entries, in place. Each rank reads its own shards."""
        state = {name: entry for name, entry in wanted.items() if name not in self._in_file}
        from_file = {name: entry for name, entry in wanted.items() if name in self._in_file and name in IN_PARTS}
        # With the default, torch 2.13 mistakes the checkpoint for one of torch 2.3 on a rank that has no shard of an
        # FSDP1 tensor.
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        every = dict(tensors_by_dotted_key(from_file)) | state
        try:
            state_dict_loader.load(every, storage_reader=self._reader, planner=planner, process_group=self._ranks.group)
        except CheckpointException as error:
            raise to_rank_error(error, self.path, "load") from error
        wanted |= {name: unwrap_dict_from_tuple(every[name]) for name in state}
