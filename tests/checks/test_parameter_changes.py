"""Moved: how far parameters went, with torch as the judge, and in quadrature where layers are taken together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckptkit import moved
from ckptkit.errors import Mismatch
from tests.producers import save_alone


def model(seed: int, prefix: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = {f"{prefix}layers.{i}.up.weight": torch.randn(6, 5, generator=generator) for i in range(3)}
    return {f"{prefix}embed": torch.randn(9, 5, generator=generator), **layers, f"{prefix}ids": torch.arange(3)}


def change(before: list[Tensor], after: list[Tensor]) -> float:
    a, b = (torch.cat([x.double().reshape(-1) for x in side]) for side in (before, after))
    return ((b - a).norm() / a.norm()).item()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two models, of which one tensor is the same, saved with an optimizer and without, the second under a wrapper."""
    before, after = model(0), {name: tensor * 1.1 for name, tensor in model(0).items()}
    after["layers.1.up.weight"] = model(1)["layers.1.up.weight"].bfloat16()
    after["layers.2.up.weight"] = before["layers.2.up.weight"]
    save_alone({"model": before, "optim": {"state": {"embed": {"exp_avg": torch.ones(2)}}}}, tmp_path / "a")
    torch.save(after, tmp_path / "b.pt")
    return before, after


def test_every_parameter(pair: tuple[dict[str, Tensor], dict[str, Tensor]], tmp_path: Path) -> None:
    before, after = pair
    found = moved(tmp_path / "a", tmp_path / "b.pt")
    by_name = {movement.name: movement for movement in found.tensors}
    assert by_name.keys() == before.keys() - {"ids"}
    for name, movement in by_name.items():
        x, y = before[name].double(), after[name].double()
        assert movement.change == pytest.approx(change([x], [y]), rel=1e-9)
        assert movement.distance.max_abs == (x - y).abs().max()
        assert movement.distance.cosine == pytest.approx(
            torch.cosine_similarity(x.reshape(-1), y.reshape(-1), 0).item()
        )
    changes = [movement.change for movement in found.tensors]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] == 0
    assert "left out 1 tensor: missing in" in found.notes[0]
    assert "the dtypes of 1 tensor differ" in found.notes[1]
    assert f"run `ckptkit delta {tmp_path / 'a'} {tmp_path / 'b.pt'} OUT --dry-run`" in found.notes[1]
    assert not any("dtype" in text for text in moved(tmp_path / "a", tmp_path / "a").notes)


def test_layers_are_taken_together(pair: tuple[dict[str, Tensor], dict[str, Tensor]], tmp_path: Path) -> None:
    before, after = pair
    found = moved(tmp_path / "a", tmp_path / "b.pt")
    layers = [f"layers.{i}.up.weight" for i in range(3)]
    kinds = {kind.name: kind for kind in found.by_kind}
    assert kinds.keys() == {"embed", "layers.*.up.weight"}
    kind = kinds["layers.*.up.weight"]
    assert (kind.tensors, kind.peak) == (3, "layers.1.up.weight")
    assert kind.change == pytest.approx(change([before[name] for name in layers], [after[name] for name in layers]))
    assert found.whole.tensors == 4
    everything = ["embed", *layers]
    assert found.whole.change == pytest.approx(
        change([before[name] for name in everything], [after[name] for name in everything])
    )


def test_nothing_in_common(tmp_path: Path) -> None:
    torch.save(model(0), tmp_path / "a.pt")
    torch.save(model(0, "other."), tmp_path / "b.pt")
    with pytest.raises(Mismatch) as raised:
        moved(tmp_path / "a.pt", tmp_path / "b.pt")
    assert "ckptkit diff" in (raised.value.hint or "")


def test_the_fraction_that_is_bit_equal(tmp_path: Path) -> None:
    before = {"a": torch.zeros(10, 10), "b": torch.zeros(50), "none": torch.zeros(0, 3)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["a"].view(-1)[:3] = -0.0  # the same number, other bits
    after["b"][7] = float("nan")
    torch.save(before, tmp_path / "a.pt")
    torch.save(after, tmp_path / "b.pt")
    found = moved(tmp_path / "a.pt", tmp_path / "b.pt")
    assert {movement.name: movement.equal for movement in found.tensors} == {"a": 0.97, "b": 0.98, "none": 1.0}
    assert found.whole.equal == 1 - 4 / 150
