"""Sharded: a state as a directory of DCP's, of which every rank writes and reads its own part. Chooses no place for it.

Model and optimizer lie in it tensor by tensor, as torch's own recipe has them. Any other state is one entry, as rank 0
has it: taken apart, its numbers for keys would come back as strings and its empty dicts not at all.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ckptkit.errors import CkptError, Corrupt, IOFailure, NoRoom, Unsupported
from ckptkit.layout import Spec
from ckptkit.storage import Reader, find_cause
from ckptkit.train.saving.gather import copy_sharded
from ckptkit.train.saving.peers import Peers
from ckptkit.train.saving.trees import Tree, map_tensors

IN_PARTS = ("model", "optim")


class ShardedForm:
    """States written and read shard by shard."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),  # and kept for the next copy, since pinning is slow
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def hold(self, state: Tree, *, copy: bool) -> Tree:
        """The state as it will be written; with `copy` in memory on the CPU that the training never touches."""
        parts = {name: part for name, part in state.items() if name in IN_PARTS}
        if copy:
            parts = map_tensors(self._copy, parts)
        if self._peers.rank == 0:
            parts |= {name: wrap(part) for name, part in state.items() if name not in IN_PARTS}
        return parts

    def _copy(self, tensor: Tensor) -> Any:
        if isinstance(tensor, ShardedTensor):
            return copy_sharded(tensor)  # of FSDP1 without a device mesh: the stager does not know it
        staged = self._stager.stage({"": tensor})
        assert isinstance(staged, dict)
        return staged[""]

    def write(self, room: Path, held: Tree) -> None:
        """Write what `hold` gave, every rank its own shards; what goes wrong on any is raised on all."""
        try:
            state_dict_saver.save(held, checkpoint_id=room, process_group=self._peers.group)
        except CheckpointException as error:
            raise translate(error, room, "save") from error

    def outline(self, path: Path) -> Tree:
        """The stored state without its data: tensors have a shape and a dtype, all else is None."""
        return self._peers.on_first(lambda: read_outline(path))

    def read(self, path: Path, wanted: Tree) -> None:
        """Read into `wanted`, which is all or some of the outline, every rank its own shards."""
        # Otherwise a rank without a shard of one of FSDP1's tensors takes the checkpoint for one of torch 2.3 (2.13).
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        try:
            state_dict_loader.load(
                wanted, storage_reader=Reader(path), planner=planner, process_group=self._peers.group
            )
        except CheckpointException as error:
            raise translate(error, path, "load") from error
        wanted.update({name: unwrap(part) for name, part in wanted.items()})


def wrap(part: Any) -> Any:
    """A dict as DCP stores it whole: in a tuple, which it does not take apart."""
    return (part,) if isinstance(part, dict) else part


def unwrap(part: Any) -> Any:
    """What `wrap` was given. A dict that lies in no tuple, as in a checkpoint that was converted, is left as it is."""
    return part[0] if isinstance(part, tuple) and len(part) == 1 and isinstance(part[0], dict) else part


def read_outline(path: Path) -> Tree:
    """The nested dicts that a directory of DCP's holds: tensors without data in them, and None for all else.

    Read by us and not by torch, which would run whatever code its metadata brings along.
    """
    layout = Reader(path).open()
    if not layout.keys:
        raise Unsupported("saved without the names of what is nested in it", path=path)
    leaves: dict[str, Tensor | None] = {name: without_data(spec) for name, spec in layout.specs.items()}
    leaves |= dict.fromkeys(layout.blobs)
    return unflatten_state_dict(leaves, dict(layout.keys))


def without_data(spec: Spec) -> Tensor:
    """A tensor of a shape and a dtype without memory."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device="meta")


def translate(error: CheckpointException, path: Path, verb: str) -> CkptError:
    """The CkptError that says what stopped the first of the ranks that failed."""
    cause = find_cause(error)
    if isinstance(cause, CkptError):
        return cause
    rank, (reason, _) = min(error.failures.items())
    said = str(reason).strip() or type(reason).__name__
    message = f"rank {rank} could not {verb} it: {said.splitlines()[0]}"
    if isinstance(reason, OSError):
        full = reason.errno in (errno.ENOSPC, errno.EDQUOT)
        return (NoRoom if full else IOFailure)(message, path=reason.filename or path)
    if verb == "save":
        return IOFailure(message, path=path, hint="is the disk full, or a limit on it reached?")
    return Corrupt(message, path=path)
