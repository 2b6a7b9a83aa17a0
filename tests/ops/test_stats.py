"""What the numbers of real checkpoints look like, and which of them catch the eye."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.dtypes import DTYPES
from ckptkit.layout import Spec
from ckptkit.ops.stats import TensorStats, scan
from tests import producers
from tests.conftest import Produce
from tests.producers import Producer


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.full, producers.strided, producers.dtypes])
def test_stats_are_those_of_the_tensors(produce: Produce, producer: Producer) -> None:
    made = produce(producer)
    told: list[tuple[int, int]] = []
    found = scan(made.root, jobs=2, progress=lambda nbytes, total: told.append((nbytes, total)))
    truth = {name: value for name, value in made.truth.items() if isinstance(value, torch.Tensor)}
    assert {stats.name for stats in found} == set(truth)
    for stats in found:
        expected = truth[stats.name]
        if expected.dtype.is_floating_point and expected.dtype.itemsize > 1:
            numbers = expected.double()
            assert (stats.numbers, stats.nan) == (expected.numel(), int(numbers.isnan().sum()))
            assert stats.inf == int(numbers.isinf().sum())
            assert stats.zero == int((numbers == 0).sum())
    assert {total for _, total in told} == {sum(nbytes for nbytes, _ in told)}


def test_what_catches_the_eye(tmp_path: Path) -> None:
    tensors = {
        "zero": torch.zeros(3, 5),
        "nearly": torch.cat([torch.zeros(99), torch.ones(1)]),
        "tiny": torch.full((4,), 1e-42),
        "one": torch.ones(7, dtype=torch.int64),
        "alone": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "nan": torch.full((2,), torch.nan),
        "mixed": torch.tensor([1.0, torch.nan, -torch.inf, 1.0]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = {stats.name: stats for stats in scan(tmp_path)}
    assert {name for name, stats in found.items() if stats.is_all_zero} == {"zero"}
    assert {name for name, stats in found.items() if stats.is_constant} == {"zero", "tiny", "one"}
    assert found["tiny"].denormal == 4
    assert (found["mixed"].nan, found["mixed"].inf) == (1, 1)
    assert (found["mixed"].low, found["mixed"].high) == (-torch.inf, 1.0)
    assert (found["nan"].low, found["nothing"].high) == (None, None)


def test_a_constant_with_nan_in_it_is_none() -> None:
    stats = TensorStats("t", Spec(DTYPES["float32"], (3,)), 3, 0, 0, 0, 0, 1.0, 1.0)
    assert stats.is_constant
    assert not replace(stats, nan=1).is_constant
