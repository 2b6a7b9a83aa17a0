"""Hugging Face: a state whose model any loader opens, with DCP's directory for all else. Chooses no place for it.

model.safetensors, or several and their index   the model, every rank's shards written to their final place
training/                                       optimizer and the rest, as the sharded form has them

config.json and the tokenizer's files are put beside them by whoever saves.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ckptkit.checkpoints.expected import HEAD, find_embedding, is_tied
from ckptkit.checkpoints.trainers.ckptkit import TRAINING
from ckptkit.errors import Mismatch
from ckptkit.storage import Reader, RoomWriter
from ckptkit.train.saving.full import FILE, FullForm
from ckptkit.train.saving.peers import Peers
from ckptkit.train.saving.sharded import ShardedForm, translate, without_data
from ckptkit.train.saving.trees import Tree

CONFIG = "config.json"
MODEL = "model"


class HuggingFaceForm:
    """States of which the model is written in the format of Hugging Face, and the rest sharded.

    Where `config` (the text of config.json, if there is one) ties the head to the embedding, it is written once.
    """

    def __init__(self, peers: Peers, config: bytes | None) -> None:
        self._peers = peers
        self._sharded = ShardedForm(peers)
        self._full = FullForm(peers)
        self._is_tied = config is not None and is_tied(json.loads(config))

    def hold(self, state: Tree, *, copy: bool) -> Tree:
        """The state as it will be written; with `copy` in memory on the CPU that the training never touches."""
        if self._is_tied:
            state = {**state, MODEL: self._peers.together(lambda: drop_head(state[MODEL]))}
        return self._sharded.hold(state, copy=copy)

    def write(self, room: Path, held: Tree) -> None:
        """Write what `hold` gave, every rank its own shards; what goes wrong on any is raised on all."""
        rest = {name: part for name, part in held.items() if name != MODEL}
        try:
            state_dict_saver.save(held[MODEL], storage_writer=RoomWriter(room), process_group=self._peers.group)
        except CheckpointException as error:
            raise translate(error, room, "save") from error
        self._sharded.write(room / TRAINING, rest)

    def outline(self, path: Path) -> Tree:
        """The stored state without its data: tensors have a shape and a dtype, all else is None."""
        rest = self._rest_of(path).outline(path / TRAINING)
        return {**rest, MODEL: self._peers.on_first(lambda: outline_model(path))}

    def read(self, path: Path, wanted: Tree) -> None:
        """Read into `wanted`, which is all or some of the outline, every rank its own shards."""
        rest = {name: part for name, part in wanted.items() if name != MODEL}
        self._rest_of(path).read(path / TRAINING, rest)
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)  # as the sharded form has it
        try:
            state_dict_loader.load(
                wanted[MODEL], storage_reader=Reader(path), planner=planner, process_group=self._peers.group
            )
        except CheckpointException as error:
            raise translate(error, path, "load") from error
        wanted.update(rest)

    def _rest_of(self, path: Path) -> ShardedForm | FullForm:
        """The form that all but the model is in: sharded as it is saved, or converted to one file."""
        return self._full if self._peers.on_first((path / TRAINING / FILE).exists) else self._sharded


def outline_model(path: Path) -> Tree:
    """The model's tensors without data."""
    return {name: without_data(spec) for name, spec in Reader(path).open().specs.items()}


@torch.no_grad()
def drop_head(model: Tree) -> Tree:
    """The model without the head that is tied to its embedding. Raises `Mismatch` if they are not equal."""
    embedding = find_embedding(model)
    if embedding is None or HEAD not in model:
        return model
    ours, theirs = (parts_of(model[name]) for name in (HEAD, embedding))
    if not all(map(torch.equal, ours, theirs)):
        hint = "was it tied anew after the model was wrapped? else its config needs tie_word_embeddings false"
        raise Mismatch(f"config.json ties it to `{embedding}`, but they differ", tensor=HEAD, hint=hint)
    return {name: tensor for name, tensor in model.items() if name != HEAD}


def parts_of(tensor: Tensor) -> list[Tensor]:
    """What this rank has of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]
