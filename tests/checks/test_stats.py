"""What the numbers of real checkpoints look like, and which of them catch the eye."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.checks.stats import TensorStats, stats
from ckptkit.errors import Corrupt, Usage
from ckptkit.layout import Spec
from ckptkit.layout.dtypes import DTYPES
from tests import producers
from tests.conftest import Produce
from tests.producers import Producer


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.full, producers.strided, producers.dtypes])
def test_stats_are_those_of_the_tensors(produce: Produce, producer: Producer) -> None:
    made = produce(producer)
    told: list[tuple[int, int]] = []
    found = stats(made.root, jobs=2, progress=lambda nbytes, total: told.append((nbytes, total))).tensors
    truth = {name: value for name, value in made.truth.items() if isinstance(value, torch.Tensor)}
    assert {each.name for each in found} == set(truth)
    for each in found:
        expected = truth[each.name]
        if expected.dtype.is_floating_point and expected.dtype.itemsize > 1:
            numbers = expected.double()
            assert (each.numbers, each.nan) == (expected.numel(), int(numbers.isnan().sum()))
            assert each.inf == int(numbers.isinf().sum())
            assert each.zero == int((numbers == 0).sum())
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
    found = {each.name: each for each in stats(tmp_path).tensors}
    assert {name for name, each in found.items() if each.is_all_zero} == {"zero"}
    assert {name for name, each in found.items() if each.is_constant} == {"zero", "tiny", "one"}
    assert found["tiny"].denormal == 4
    assert (found["mixed"].nan, found["mixed"].inf) == (1, 1)
    assert (found["mixed"].low, found["mixed"].high) == (-torch.inf, 1.0)
    assert (found["nan"].low, found["nothing"].high) == (None, None)


@pytest.mark.parametrize("to", ["dcp", "pt", "hf"])
def test_damaged_numbers_are_not_counted(tmp_path: Path, to: str) -> None:
    tensors = {"w": torch.arange(48.0).reshape(8, 6), "x": torch.arange(48.0, 96.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    root = tmp_path / "out"
    ckptkit.convert(tmp_path / "model.safetensors", root, to=to, names="keep")
    assert stats(root).total.numbers == 96
    data = tensors["x"].numpy().tobytes()[:64]
    (file,) = (one for one in root.iterdir() if data in one.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(data) + 2] ^= 1
    made = (root / "ckptkit.json").stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(made, made))
    with pytest.raises(Corrupt, match="CRC-32"):
        stats(root)


def test_a_constant_with_nan_in_it_is_none() -> None:
    stats = TensorStats(name="t", spec=Spec(DTYPES["float32"], (3,)), numbers=3, low=1.0, high=1.0)
    assert stats.is_constant
    assert not replace(stats, nan=1).is_constant


def test_mean_deviation_and_norm_are_those_of_torch(produce: Produce) -> None:
    made = produce(producers.fsdp2)
    for found in stats(made.root).tensors:
        numbers = made.truth[found.name].double()
        assert found.moments.mean == pytest.approx(numbers.mean().item(), rel=1e-12, abs=1e-15)
        assert found.moments.deviation == pytest.approx(numbers.std(correction=0).item(), rel=1e-12, abs=1e-15)
        assert found.moments.norm == pytest.approx(numbers.norm().item(), rel=1e-12)
        assert found.sparsity == (numbers == 0).double().mean().item()


def test_modules_alike_are_one_line_with_the_numbers_of_all(tmp_path: Path) -> None:
    layers = {f"layers.{i}.{name}.weight": torch.randn(5, 3 + j) + i for i in range(12) for j, name in enumerate("ab")}
    save_file({**layers, "norm": torch.tensor([0.0, torch.nan])}, tmp_path / "model.safetensors")
    found = stats(tmp_path)
    lines = {branch.label: counted for branch, counted in found.by_module()}
    assert lines.keys() == {"layers.0-11.  x12", "a.weight", "b.weight", "norm"}
    for label, names in (("layers.0-11.  x12", "ab"), ("b.weight", "b")):
        numbers = torch.cat(
            [layers[f"layers.{i}.{name}.weight"].flatten() for i in range(12) for name in names]
        ).double()
        assert lines[label].numbers == len(numbers)
        assert lines[label].moments.mean == pytest.approx(numbers.mean().item())
        assert lines[label].moments.deviation == pytest.approx(numbers.std(correction=0).item())
        assert lines[label].moments.norm == pytest.approx(numbers.norm().item())
        assert (lines[label].low, lines[label].high) == (numbers.min().item(), numbers.max().item())
    assert (found.total.nan, found.total.zero, found.total.numbers) == (1, 1, 12 * 35 + 2)


def test_globs_choose(produce: Produce) -> None:
    root = produce(producers.fsdp2).root
    found = stats(root, include=["model.*"], exclude=["*.bias"]).tensors
    assert found
    assert all(tensor.name.startswith("model.") and not tensor.name.endswith(".bias") for tensor in found)
    with pytest.raises(Usage):
        stats(root, include=["nothing.*"])


def test_counters_are_in_no_sum(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(3.0)))
    optimizer = torch.optim.AdamW(model.parameters())
    (model(torch.randn(5, 4)).square().sum() * model.scale).backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(20_000)
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "loss": torch.tensor(500.0),
    }
    torch.save(saved, tmp_path / "saved.pt")
    found = stats(tmp_path / "saved.pt")
    left_out = {tensor.name for tensor in found.tensors if not tensor.in_total}
    steps = {f"optimizer.state.{i}.step" for i in range(5)}
    assert left_out == {"model.1.num_batches_tracked", "rng", "loss"} | steps
    moments = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
    summed = [tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")]
    norm = torch.cat([tensor.double().flatten() for tensor in (*summed, *moments)]).norm().item()
    assert found.total.moments.norm == pytest.approx(norm)
    (line,) = list(found.summary())[1:]
    assert line == "not in the totals: 8 counters, such as the steps of an optimizer"
    assert stats(tmp_path / "saved.pt", include=["*.step"]).total.high == 20_000
