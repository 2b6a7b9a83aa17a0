"""Find the names of a checkpoint that stand for one tensor, by places and by config.json. Compares no bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.checkpoints.expected import HEAD, find_embedding, is_tied
from ckptkit.layout import Layout

Tie = tuple[str, ...]  # names of one tensor


def find_ties(layout: Layout, config: Mapping[str, Any] | None, weights: Mapping[str, str]) -> list[Tie]:
    """Return the names with the same bytes in the same places; and the head that `config` ties to the embedding.

    `weights` gives the name that the checkpoint has for each of the model's; the head itself may be left out of it.
    """
    places: dict[object, list[str]] = {}
    for name, tensor in layout.tensors.items():
        if tensor.spec.nbytes:
            place = tuple((chunk.path, chunk.offset, chunk.start, chunk.size, chunk.strides) for chunk in tensor.chunks)
            places.setdefault((tensor.spec, place), []).append(name)
    ties = [tuple(names) for names in places.values() if len(names) > 1]
    embedding = find_embedding(weights) if config and is_tied(config) else None
    if embedding is not None:
        head = (weights.get(HEAD, HEAD), weights[embedding])
        if not any(set(head) <= set(tie) for tie in ties):
            ties.append(head)
    return ties
