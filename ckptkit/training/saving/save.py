"""Save a state through `ckptkit.storage`: prepare the entries to write, then write them from all ranks.

Model and optimizer are stored with one entry per tensor, as in torch's DCP recipe. Every other state is one entry of
rank 0: DCP flattens nested dicts, which would turn integer keys into strings and drop empty dicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
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
from ckptkit.models.architectures import HEAD, find_embedding, has_tied_head
from ckptkit.models.companions import CONFIG
from ckptkit.storage.ranks import Ranks, to_rank_error
from ckptkit.storage.terms import local_shard, local_shards, memory_identity_of
from ckptkit.training.saving.state import Tree, map_tensors

ADAPTER = "adapter"
FORMATS = {"sharded": "dcp", "full": "pt", "hf": "hf", ADAPTER: "dcp"}  # checkpoint format by the `state_dict` option
MODEL = "model"
IN_PARTS = (MODEL, "optim")


class Saver:
    """Writes states in the format `state_dict`.

    A Hugging Face model is saved without `lm_head` if a config.json in `files` ties it to the embedding.
    """

    def __init__(self, ranks: Ranks, state_dict: str, files: Mapping[str, bytes]) -> None:
        self._ranks = ranks
        self.format = FORMATS[state_dict]
        config = files.get(CONFIG) if state_dict == "hf" else None
        self._drops_head = config is not None and has_tied_head(json.loads(config))

    def prepare_state(self, state: Tree, *, copy: bool) -> tuple[Tree, Mapping[KeyPath, str]]:
        """Return the entries to write; with `copy`, a CPU copy of them that the training does not change.

        Also maps each omitted tensor to the name of the stored tensor that it shares.
        """
        tied: dict[KeyPath, str] = {}
        if self._drops_head:
            state = {**state, MODEL: self._ranks.run_on_all_ranks(lambda: without_tied_head(state[MODEL]))}
        if self.format == "pt":
            shared = first_name_by_shared_name(state[MODEL], self._ranks)
            tied = {(MODEL, name): f"{MODEL}.{first}" for name, first in shared.items()}
            state = {**state, MODEL: {name: t for name, t in state[MODEL].items() if name not in shared}}
        entries = {name: entry for name, entry in state.items() if name in IN_PARTS}
        if self.format == "pt":
            entries = wrap_empty_dicts(entries)
        if copy:
            entries = copy_to_cpu(entries)
        if self._ranks.rank == 0:
            entries |= {name: wrap_dict_in_tuple(entry) for name, entry in state.items() if name not in IN_PARTS}
        return entries, tied

    def write_state(self, writer: StorageWriter, entries: Tree, path: Path) -> None:
        """Write entries of `prepare_state`, each rank its own shards. Raises an error of any rank on all ranks.

        `path` is for error messages only.
        """
        planner = PlainPlanner() if self.format == "pt" else None
        try:
            state_dict_saver.save(
                entries,
                storage_writer=writer,
                planner=planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.is_alone,
            )
        except CheckpointException as error:
            raise to_rank_error(error, path, "save") from error


@torch.no_grad()
def copy_to_cpu(state: Tree) -> Tree:
    """Return a copy of a state in CPU memory. Tensors that share memory share it in the copy.

    GPU tensors are copied to pinned memory asynchronously, with one synchronization at the end. Pinning is slow, but
    torch caches freed pinned memory, so the next copy reuses it.
    """
    copies: dict[object, Tensor] = {}
    streams: set[torch.cuda.Stream] = set()

    def copy(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):  # of FSDP1 without a device mesh
            on_cpu: Tensor = tensor.cpu()
            return on_cpu if on_cpu is not tensor else tensor.clone()
        key = memory_identity_of(tensor) if local_shard(tensor).numel() else object()  # an empty shard has no address
        if key not in copies:
            # DTensor.from_local would move the CPU copy back to the GPU of its mesh.
            copies[key] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            local_shard(copies[key]).copy_(local_shard(tensor), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                streams.add(torch.cuda.current_stream(tensor.device))
        return copies[key]

    def remember(tensor: Tensor) -> None:
        memo[id(tensor)] = copy(tensor)

    memo: dict[int, Tensor] = {}
    map_tensors(remember, state)
    copied = deepcopy(state, memo)  # keeps the types of dicts, and copies objects that the training may change
    for stream in streams:
        stream.synchronize()
    return copied


class PlainPlanner(DefaultSavePlanner):
    """A planner for a plain torch.save file, which stores dicts without the tuples that DCP needs."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name for it
        return super().transform_object(write_item, unwrap_dict_from_tuple(object))


def wrap_dict_in_tuple(entry: Any) -> Any:
    """Return a dict in a tuple, which DCP stores as one entry instead of flattening it."""
    return (entry,) if isinstance(entry, dict) else entry


def unwrap_dict_from_tuple(entry: Any) -> Any:
    """Undo `wrap_dict_in_tuple`. Returns a dict without a tuple, as in a converted checkpoint, unchanged."""
    return entry[0] if isinstance(entry, tuple) and len(entry) == 1 and isinstance(entry[0], dict) else entry


def wrap_empty_dicts(tree: Tree) -> Tree:
    """Return a state with its empty dicts wrapped, because DCP drops empty dicts."""
    inner = {
        name: wrap_empty_dicts(entry) if entry else wrap_dict_in_tuple(entry)
        for name, entry in tree.items()
        if isinstance(entry, dict)
    }
    return {**tree, **inner}


@torch.no_grad()
def without_tied_head(model: Tree) -> Tree:
    """Return the model's state without `lm_head`. Raises `Mismatch` if it differs from the embedding tied to it."""
    embedding = find_embedding(model)
    if embedding is None or HEAD not in model:
        return model
    ours, theirs = (local_shards(model[name]) for name in (HEAD, embedding))
    if not all(map(torch.equal, ours, theirs)):
        hint = "tie it again after wrapping the model, or set tie_word_embeddings to false in its config"
        raise Mismatch(f"config.json ties it to `{embedding}`, but they differ", tensor=HEAD, hint=hint)
    return {name: tensor for name, tensor in model.items() if name != HEAD}


def first_name_by_shared_name(model: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Map each further name of a shared tensor to its first name; a collective.

    Two names share a tensor if every rank that has a non-empty shard of it sees the same memory under both.
    """
    first: dict[object, str] = {}
    first_names = {}
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, ShardedTensor):  # a module's extra state is any object
            continue
        if local_shard(tensor).numel():
            first_names[name] = first.setdefault(memory_identity_of(tensor), name)
    votes: dict[str, set[str]] = {}
    for votes_of_rank in ranks.gather_values(first_names):
        for name, first_name in votes_of_rank.items():
            votes.setdefault(name, set()).add(first_name)
    return {name: agreed for name, (agreed, *others) in votes.items() if name != agreed and not others}
