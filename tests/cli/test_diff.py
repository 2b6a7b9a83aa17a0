"""`ckptkit diff` and `ckptkit stats A B` as their users see them: exit codes, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import ckptkit
from tests.producers import save_alone


def state(change: float = 0.0) -> dict[str, Any]:
    """A model of 30 layers with an optimizer and a step; `change` makes every other layer another."""
    layers = {f"layers.{i}.w": torch.full((4, 3), 1.0 + change * (i % 2) * (i + 1)) for i in range(30)}
    moments = {name: {"exp_avg": tensor.clone()} for name, tensor in layers.items()}
    return {"model": layers, "optim": {"state": moments}, "step": 3 + int(change > 0)}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    save_alone(state(), tmp_path / "run" / "ckpt-3")
    save_alone(state(0.01), tmp_path / "run" / "ckpt-4")
    return tmp_path / "run" / "ckpt-3", tmp_path / "run" / "ckpt-4"


def test_the_same(pair: tuple[Path, Path]) -> None:
    done = ckptkit("diff", pair[1], pair[0].parent)
    assert (done.returncode, done.stdout) == (0, "the same: 60 tensors, 2.88 KB\n")
    assert f"using {pair[1]}" in done.stderr
    found = json.loads(ckptkit("diff", pair[0], pair[0], "--json").stdout)
    assert found["equal"] is True
    assert found["different"] == found["only_in_a"] == found["only_in_b"] == []


def test_what_differs(pair: tuple[Path, Path]) -> None:
    done = ckptkit("diff", *pair)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["0.182", "0.3", "all", "model.layers.*.w", "x15"]
    assert lines[2].split()[-2:] == ["optim.state.layers.*.w.exp_avg", "x15"]
    assert lines[3:] == [
        "entries with another value or dtype:",
        "  step: 3 => 4",
        "not the same: 31 entries differ (15 of the model); compared: 60 tensors, 2.88 KB",
    ]
    assert f"ckptkit stats {pair[0]} {pair[1]}" in done.stderr
    everything = ckptkit("diff", *pair, "--all").stdout.splitlines()
    assert everything[1].split() == ["0.3", "0.3", "all", "[0,0]", "model.layers.29.w"]
    assert len(everything) == 1 + 30 + 3
    assert ckptkit("diff", *pair, "--include", "*.w*", "--atol", "0.31").returncode == 0
    assert ckptkit("diff", *pair, "--atol", "-1").returncode == 2


def test_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = state()
    weights = other.pop("model")
    del other["optim"]["state"]["layers.1.w"]
    weights["layers.0.w"][2, 1] = torch.inf
    weights["layers.3.w"] = weights["layers.3.w"].half()
    weights["layers.4.w"] = torch.zeros(5)
    weights["layers.5.w"] = torch.zeros(4, 3)
    weights["extra"] = torch.ones(2)
    torch.save({"model": weights, **other}, tmp_path / "b.pt")
    done = ckptkit("diff", pair[0], tmp_path / "b.pt", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert found["equal"] is False
    assert found["only_in_a"] == ["optim.state.layers.1.w.exp_avg"]
    assert found["only_in_b"] == ["extra"]
    by_name = {one["name"]: one for one in found["different"]}
    assert {name: one["reason"] for name, one in by_name.items()} == {
        "layers.0.w": "values",
        "layers.3.w": "dtype",
        "layers.4.w": "shape",
        "layers.5.w": "values",
    }
    back = ckptkit("diff", tmp_path / "b.pt", pair[0], "--json", "--include", "layers.5.w").stdout
    (one,) = json.loads(back, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))["different"]
    assert (one["rel_l2"], one["max_abs"]) == (None, 1)
    first = by_name["layers.0.w"]
    assert (first["first"], first["strange"], first["elements"], first["max_abs"]) == ([2, 1], 1, 1, 0)
    assert by_name["layers.4.w"] | {"first": None, "max_abs": None} == by_name["layers.4.w"]
    assert (by_name["layers.4.w"]["a"], by_name["layers.4.w"]["b"]) == ("float32[4,3]", "float32[5]")
    halves = ckptkit("diff", pair[0], tmp_path / "b.pt", "--include", "layers.3.w").stdout
    assert halves.splitlines()[0].endswith("tensor: float32 => float16")
    text = ckptkit("diff", pair[0], tmp_path / "b.pt").stdout
    assert "another shape:\n  layers.4.w: [4,3] => [5]\n" in text
    assert "layers.3.w: float32 => float16" in text
    assert "1, 1 NaN/Inf  [2,1]" in text
    assert "only in B" in text
    assert {"renamed", "notes", "tensors", "nbytes", "checked_bytes"} <= found.keys()


def test_renames_are_said_as_rules(tmp_path: Path) -> None:
    for name, prefix in (("a", "encoder"), ("b", "model.blocks")):
        kinds = {"w": torch.randn(3, 2, generator=torch.Generator().manual_seed(1)), "bias": torch.ones(3)}
        torch.save({f"{prefix}.{i}.{kind}": x + i for i in range(40) for kind, x in kinds.items()}, tmp_path / name)
    done = ckptkit("diff", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "renamed:",
        "  encoder.* => model.blocks.*  x80",
        "not the same: 80 renamed but equal; compared: 80 tensors, 1.44 KB",
    ]
    assert len(json.loads(ckptkit("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)["renamed"]) == 80


def test_no_checkpoint_or_a_damaged_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert ckptkit("diff", pair[0], tmp_path / "missing").returncode == 3
    for file in pair[1].glob("*.distcp"):
        raw = file.read_bytes()
        at = raw.index(torch.full((12,), 1.0).numpy().tobytes())
        file.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    done = ckptkit("diff", *pair)
    assert done.returncode == 3
    assert "CRC-32" in done.stderr


def test_what_moved_most(pair: tuple[Path, Path], tmp_path: Path) -> None:
    torch.save({f"only.{name}": torch.ones(2) for name in "abc"}, tmp_path / "other.pt")
    done = ckptkit("stats", *pair)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].split()[:2] == ["0.129", "0.3"]
    assert done.stdout.splitlines()[1].split()[3:] == ["50.00%", "29", "layers.*.w", "x30"]
    result = json.loads(ckptkit("stats", *pair, "--json").stdout)
    assert result["equal"] == 0.5
    found = result["moved"]
    assert [one["name"] for one in found[:2]] == ["layers.29.w", "layers.27.w"]
    assert found[0]["change"] == pytest.approx(0.3, rel=1e-6)
    assert len(found) == 30
    assert ckptkit("stats", pair[0], tmp_path / "other.pt").returncode == 3
