"""Tensors of a model in chunks that were cut anywhere, in one file of numbers in memory: what tables are applied to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptkit.layout import StoredTensor
from ckptkit.models.names import get_family
from ckptkit.models.names.between_families import translate_family_to_hub, translate_hub_to_family
from ckptkit.models.names.sizes import Sizes
from tests.raw import Numbers
from tests.stored_tensors import contents, stored

Arrays = Mapping[str, Tensor]


def shelve(arrays: Arrays) -> tuple[dict[str, StoredTensor], Numbers]:
    """The tensors, each in chunks of one, two or three rows; and the file, of 32-bit numbers."""
    found: dict[str, StoredTensor] = {}
    files: list[Numbers] = []
    at = 0
    for i, (name, tensor) in enumerate(arrays.items()):
        numbers = tensor.detach().contiguous().view(torch.int32).numpy()
        order = list(range(numbers.ndim))
        one, file = stored(numbers, list(range(1 + i % 3, max(len(numbers), 1), 1 + i % 3)), order)
        chunks = tuple(chunk._replace(offset=chunk.offset + at) for chunk in one.chunks)
        found[name] = replace(one, chunks=chunks)
        files.append(file)
        at += 4 * file.size
    return found, np.concatenate(files)


def unshelve(tensors: Mapping[str, StoredTensor], file: Numbers) -> dict[str, Tensor]:
    """The tensors as they are."""
    return {name: torch.from_numpy(contents(one, file)).view(torch.float32) for name, one in tensors.items()}


def to_the_hub(family: str, arrays: Arrays, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the table of a family makes of its tensors."""
    table = get_family(family)
    assert table is not None
    tensors, file = shelve(arrays)
    return unshelve(translate_family_to_hub(table, tensors, Sizes(config)).tensors, file)


def to_the_family(family: str, arrays: Arrays, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the table of a family makes of the Hub's tensors."""
    table = get_family(family)
    assert table is not None
    tensors, file = shelve(arrays)
    return unshelve(translate_hub_to_family(table, tensors, Sizes(config)).tensors, file)


def check_both_ways(family: str, own: Arrays, hub: Arrays, config: Mapping[str, Any]) -> None:
    """Hold what a table makes against what somebody else's code made: the same names, the same bits."""
    check_same(to_the_hub(family, own, config), hub)
    check_same(to_the_family(family, hub, config), own)


def check_same(found: Arrays, wanted: Arrays) -> None:
    assert sorted(found) == sorted(wanted), sorted(found.keys() ^ wanted.keys())
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def random_like(arrays: Arrays) -> dict[str, Tensor]:
    """Random numbers in the shapes of some tensors, as moments have them."""
    return {name: torch.randn(tensor.shape) for name, tensor in arrays.items()}
