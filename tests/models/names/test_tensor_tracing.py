"""Stored tensors moved by functions of torch, and by transformers' own operations, against torch on the same."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import core_model_loading as theirs

from ckptkit.errors import Unsupported
from ckptkit.models.names.tensor_tracing import MovedTensor
from tests.raw import Numbers
from tests.stored_tensors import contents, stored

CUTS = [[], [1], [2, 3, 5, 7, 11]]
CONFIG = SimpleNamespace(vision_config=SimpleNamespace(num_attention_heads=3), parts=3)
vars(CONFIG)["get_text_config"] = lambda: CONFIG

MOVES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "cat": (lambda t: torch.cat([t, t[:, 1:3], t], dim=1), (4, 5)),
    "stack": (lambda t: torch.stack([t, t], dim=-1), (4, 5)),
    "unbind": (lambda t: t.unbind(1), (4, 5)),
    "chunk": (lambda t: t.chunk(3, dim=0), (7, 2)),
    "chunk of ones": (lambda t: t.chunk(5, dim=1), (4, 5, 2)),
    "split": (lambda t: t.split([1, 4, 2]), (7, 2)),
    "select": (lambda t: t[:, -2], (4, 5)),
    "slice": (lambda t: t[1:, 2:-1], (4, 5)),
    "transpose": (lambda t: t.transpose(0, -1).contiguous(), (4, 5, 2)),
    "permute": (lambda t: t.permute(2, 0, 1).clone(), (4, 5, 2)),
    "t": (lambda t: t.t(), (4, 5)),
    "squeeze": (lambda t: t.squeeze(1).squeeze(0), (4, 1, 2)),
    "squeeze all": (lambda t: t.squeeze(), (1, 4, 1, 2, 1)),
    "unsqueeze": (lambda t: t.unsqueeze(-1).unsqueeze(1), (4, 5)),
    "reshape, split": (lambda t: t.reshape(4, 3, 2, 5), (4, 6, 5)),
    "reshape, merged": (lambda t: t.reshape(4, -1), (4, 6, 5)),
    "reshape, both": (lambda t: t.reshape(6, 4, 5), (4, 6, 5)),
    "reshape, ones": (lambda t: t.reshape(4, 1, 5, 1), (4, 5)),
    "reshape, transposed": (lambda t: t.transpose(0, 1).reshape(6, 20), (4, 6, 5)),
    "view of all": (lambda t: t.view(-1), (4, 5)),
}


def numbers(tensor: Tensor) -> Numbers:
    return np.asarray(tensor.contiguous())


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str, cuts: list[int]) -> None:
    move, shape = MOVES[name]
    whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    tensor, file = stored(numbers(whole), cuts, list(range(len(shape))))
    found, expected = move(MovedTensor(tensor)), move(whole)
    for one, other in zip(as_list(found), as_list(expected), strict=True):
        assert one.shape == other.shape == one.stored.spec.shape
        assert np.array_equal(contents(one.stored, file), numbers(other))


def as_list(found: Any) -> list[Any]:
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("move", [lambda t: t + 1, lambda t: t[::2], lambda t: t.to(torch.float32)])
def test_what_computes_is_refused(move: Callable[[Tensor], Any]) -> None:
    tensor, _ = stored(np.arange(6, dtype=np.int32), [], [0])
    with pytest.raises(Unsupported):
        move(MovedTensor(tensor))


OPERATIONS: dict[str, tuple[Any, list[tuple[int, ...]], list[str]]] = {
    "Chunk": (theirs.Chunk(dim=1), [(2, 6)], ["a", "b", "c"]),
    "Chunk by config": (theirs.Chunk(dim=0, num_shards_attribute="parts"), [(6, 2)], ["a.*"]),
    "Concatenate": (theirs.Concatenate(dim=1), [(4, 2), (4, 5)], ["a"]),
    "Interleave": (theirs.Interleave(dim=1), [(3, 8, 5)], ["a"]),
    "Interleave back": (theirs.Interleave(dim=1, inverse=True), [(3, 8, 5)], ["a"]),
    "MergeModulelist": (theirs.MergeModulelist(dim=0), [(4, 2)], ["a"]),
    "SplitModulelist": (theirs.SplitModulelist(dim=0), [(12, 2, 3)], ["a.*"]),
    "Transpose": (theirs.Transpose(1, 2), [(3, 4, 5)], ["a"]),
    "PermuteForRope": (theirs.PermuteForRope("vision_config", ["s"]), [(12, 5)], ["a"]),
    "PermuteForRope of a bias": (theirs.PermuteForRope("vision_config", ["s"]), [(12,)], ["a"]),
    "PermuteForRope back": (theirs.PermuteForRope("vision_config", ["s"], inverse=True), [(12, 5)], ["a"]),
    "Conv3dToLinear": (theirs.Conv3dToLinear(3, (2, 2, 1)), [(5, 3, 2, 2, 1)], ["a"]),
    "LinearToConv3d": (theirs.LinearToConv3d(3, (2, 2, 1)), [(5, 12)], ["a"]),
    "Ernie": (theirs.ErnieSplitAndDecoupleTextVisionExperts(), [(3, 4, 5), (3, 4, 5)], ["a.*", "b.*"]),
}


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_transformers(name: str, cuts: list[int]) -> None:
    operation, shapes, targets = OPERATIONS[name]
    sources: list[str] = []
    files: list[Numbers] = []
    moved, wholes = {}, {}
    for i, shape in enumerate(shapes):
        whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape) + 1000 * i
        tensor, file = stored(numbers(whole), cuts, list(range(len(shape))))
        start = 4 * sum(len(one) for one in files)
        chunks = tuple(chunk._replace(offset=chunk.offset + start) for chunk in tensor.chunks)
        sources.append(f"s{i}")
        moved[f"s{i}"], wholes[f"s{i}"] = [MovedTensor(type(tensor)(tensor.spec, chunks))], [whole]
        files.append(file)
    file = np.concatenate(files)
    found, expected = (
        operation.convert(given, source_patterns=sources, target_patterns=targets, config=CONFIG)
        for given in (moved, wholes)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(contents(found[key].stored, file), numbers(value)), key
