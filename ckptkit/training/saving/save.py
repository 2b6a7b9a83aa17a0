"""Save a state through `ckptkit.storage`: hold it as it will be written, and write it by all ranks. Chooses no place.

Model and optimizer lie in a checkpoint tensor by tensor, as torch's own recipe has them. Any other state is one entry,
as rank 0 has it: taken apart, its numbers for keys would come back as strings and its empty dicts not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import StorageWriter

from ckptkit.errors import Mismatch
from ckptkit.layout import KeyPath
from ckptkit.models.known_types import HEAD, find_embedding, is_tied
from ckptkit.storage.ranks import Ranks, translate
from ckptkit.storage.terms import identify, local_part, local_parts
from ckptkit.training.saving.state import Tree, map_tensors

ADAPTER = "adapter"
FORMATS = {
    "sharded": "dcp",
    "full": "pt",
    "hf": "hf",
    ADAPTER: "dcp",
}  # of a checkpoint, by the word for its state dict
CONFIG = "config.json"
MODEL = "model"
IN_PARTS = (MODEL, "optim")


@dataclass(frozen=True, slots=True)
class PendingState:
    """A state as it will be written; `tied` has tensors left out of it, and the names of others that are the same."""

    state: Tree
    tied: Mapping[KeyPath, str] = field(default_factory=dict)


class Saver:
    """A saver of states in the form `state_dict`, each with `files` beside it.

    Where a config.json among these ties the head to the embedding, a Hugging Face model has the two once.
    """

    def __init__(self, ranks: Ranks, state_dict: str, files: Mapping[str, bytes]) -> None:
        self._ranks = ranks
        self.format = FORMATS[state_dict]
        config = files.get(CONFIG) if state_dict == "hf" else None
        self._drops_head = config is not None and is_tied(json.loads(config))

    def hold(self, state: Tree, *, copy: bool) -> PendingState:
        """Return the state as it will be written; with `copy` in memory on the CPU that the training never touches."""
        tied: dict[KeyPath, str] = {}
        if self._drops_head:
            state = {**state, MODEL: self._ranks.together(lambda: drop_head(state[MODEL]))}
        if self.format == "pt":
            shared = find_shared(state[MODEL], self._ranks)
            tied = {(MODEL, name): f"{MODEL}.{one}" for name, one in shared.items()}
            state = {**state, MODEL: {name: t for name, t in state[MODEL].items() if name not in shared}}
        parts = {name: part for name, part in state.items() if name in IN_PARTS}
        if self.format == "pt":
            parts = keep_empty(parts)
        if copy:
            parts = copy_to_cpu(parts)
        if self._ranks.rank == 0:
            parts |= {name: wrap(part) for name, part in state.items() if name not in IN_PARTS}
        return PendingState(parts, tied)

    def write(self, writer: StorageWriter, held: PendingState, path: Path) -> None:
        """Write what `hold` gave to `path`, every rank its own shards; an error on any is raised on all."""
        planner = PlainPlanner() if self.format == "pt" else None
        try:
            state_dict_saver.save(held.state, storage_writer=writer, planner=planner, process_group=self._ranks.group)
        except CheckpointException as error:
            raise translate(error, path, "save") from error


@torch.no_grad()
def copy_to_cpu(state: Tree) -> Tree:
    """Return a copy of a state in CPU memory. Tensors that share memory share it in the copy.

    Tensors of a GPU are copied to pinned memory and waited for once. Pinning is slow, but torch keeps freed pinned
    memory, so the next copy finds it pinned.
    """
    copies: dict[object, Tensor] = {}
    streams: set[torch.cuda.Stream] = set()

    def copy(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):  # of FSDP1 without a device mesh
            on_cpu: Tensor = tensor.cpu()
            return on_cpu if on_cpu is not tensor else tensor.clone()
        key = identify(tensor) if local_part(tensor).numel() else object()  # an empty shard has no address
        if key not in copies:
            # Not DTensor.from_local, which would move a copy on the CPU back to the GPU of its mesh.
            copies[key] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            local_part(copies[key]).copy_(local_part(tensor), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                streams.add(torch.cuda.current_stream(tensor.device))
        return copies[key]

    copied: Tree = map_tensors(copy, state)
    for stream in streams:
        stream.synchronize()
    return copied


class PlainPlanner(DefaultSavePlanner):
    """A planner for a file that nobody takes for DCP's: a dict lies in it as it is."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name for it
        """Return an entry as it will be written."""
        return super().transform_object(write_item, unwrap(object))


def wrap(part: Any) -> Any:
    """Return a dict as DCP stores it whole: in a tuple, which it does not take apart."""
    return (part,) if isinstance(part, dict) else part


def unwrap(part: Any) -> Any:
    """Return what `wrap` was given. A dict in no tuple, as in a checkpoint that was converted, is left as it is."""
    return part[0] if isinstance(part, tuple) and len(part) == 1 and isinstance(part[0], dict) else part


def keep_empty(tree: Tree) -> Tree:
    """Return a tree with its empty dicts wrapped: DCP would leave them out."""
    inner = {name: keep_empty(part) if part else wrap(part) for name, part in tree.items() if isinstance(part, dict)}
    return {**tree, **inner}


@torch.no_grad()
def drop_head(model: Tree) -> Tree:
    """Return the model without the head that is tied to its embedding. Raises `Mismatch` if they are not equal."""
    embedding = find_embedding(model)
    if embedding is None or HEAD not in model:
        return model
    ours, theirs = (local_parts(model[name]) for name in (HEAD, embedding))
    if not all(map(torch.equal, ours, theirs)):
        hint = "tie it again after wrapping the model, or set tie_word_embeddings to false in its config"
        raise Mismatch(f"config.json ties it to `{embedding}`, but they differ", tensor=HEAD, hint=hint)
    return {name: tensor for name, tensor in model.items() if name != HEAD}


def find_shared(model: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Return each name that is not the first of its tensor, with the first: by the memory of every rank's shards."""
    first: dict[object, str] = {}
    mine = {}
    for name, tensor in model.items():
        if not isinstance(tensor, ShardedTensor) and local_part(tensor).numel():
            mine[name] = first.setdefault(identify(tensor), name)
    votes: dict[str, set[str]] = {}
    for theirs in ranks.gather(mine):
        for name, one in theirs.items():
            votes.setdefault(name, set()).add(one)
    return {name: one for name, (one, *others) in votes.items() if name != one and not others}
