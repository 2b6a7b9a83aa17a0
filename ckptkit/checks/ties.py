"""Find the names of a checkpoint that stand for one tensor, by places and by config.json."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ckptkit.errors import Corrupt, IOFailure, Mismatch, Unsafe, Unsupported
from ckptkit.io.path import RemotePath
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.models.known_types import HEAD, find_embedding, is_tied

Tie = tuple[str, ...]  # names of one tensor


def find_ties(layout: Layout, config: Mapping[str, Any] | None, weights: Mapping[str, str]) -> list[Tie]:
    """Return the names with the same bytes in the same places; and the head that `config` ties to the embedding.

    `weights` gives the name that the checkpoint has for each of the model's; the head itself may be left out of it. If
    it is there, it is only tied if its bytes are the embedding's, which are read. A number by itself is no tie: the
    steps of a whole group may be one.
    """
    stored = {name: tensor for name, tensor in layout.tensors.items() if tensor.spec.nbytes and tensor.spec.shape}
    alike = group(stored, lambda tensor: (tensor.spec, place_of(tensor.chunks[0])))
    ties = [tuple(tie) for some in alike for tie in group(some, lambda tensor: tuple(map(place_of, tensor.chunks)))]
    embedding = find_embedding(weights) if config and is_tied(config) else None
    if embedding is not None:
        head = (weights.get(HEAD, HEAD), weights[embedding])
        if not any(set(head) <= set(tie) for tie in ties) and (head[0] not in stored or are_equal(layout, *head)):
            ties.append(head)
    return ties


def are_equal(layout: Layout, name: str, other: str) -> bool:
    """Return whether two tensors have the same bytes; False if they are in a store, or cannot be read."""
    if isinstance(layout.root, RemotePath):
        return False
    from ckptkit.models.fit import check_equal  # imports the engine, which few checkpoints need

    try:
        check_equal(layout, name, other)
    except (Corrupt, IOFailure, Mismatch, Unsafe, Unsupported):
        return False
    return True


def group(
    tensors: Mapping[str, StoredTensor], key: Callable[[StoredTensor], Hashable]
) -> list[dict[str, StoredTensor]]:
    """Return the tensors that have a key in common with another, by key."""
    found: dict[Hashable, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(key(tensor), {})[name] = tensor
    return [some for some in found.values() if len(some) > 1]


def place_of(chunk: Chunk) -> Hashable:
    """Return where the elements of a chunk lie, and which they are."""
    return chunk.path, chunk.offset, chunk.box, chunk.strides
