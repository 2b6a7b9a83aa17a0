"""`stats` as a contract: its JSON, and a table that fits."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.command import ckptkit

TENSOR = {"numbers", "norm", "mean", "std", "low", "high", "nan", "inf", "denormal", "zero", "sparsity"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with what is ordinary and what is not."""
    torch.manual_seed(0)
    layers = {f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(30, 20) for i in range(12)}
    odd = {
        "broken": torch.tensor([1.0, torch.nan, torch.inf, 0.0]),
        "nan": torch.full((2,), torch.nan),
        "tiny": torch.tensor([1e-42, -1e-42]),
        "mask": torch.tensor([True, False, False, False]),
        "nothing": torch.empty(0, 3),
    }
    save_file(layers | odd, tmp_path / "model.safetensors")
    return tmp_path


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_in_json(model: Path) -> None:
    ran = ckptkit("stats", model, "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    result = json.loads(ran.stdout, parse_constant=no_constant)
    assert result.keys() == {"path", "format", "total", "tensors"}
    tensors = {tensor["name"]: tensor for tensor in result["tensors"]}
    assert len(tensors) == 17
    assert all(tensor.keys() == TENSOR | {"name", "dtype", "shape", "in_total"} for tensor in tensors.values())
    broken = tensors["broken"]
    assert (broken["mean"], broken["std"], broken["norm"], broken["high"]) == (0.5, 0.5, 1.0, None)
    assert (broken["nan"], broken["inf"], broken["zero"], broken["sparsity"]) == (1, 1, 1, 0.25)
    assert (tensors["nan"]["mean"], tensors["nan"]["low"], tensors["nothing"]["std"]) == (None, None, None)
    assert (tensors["mask"]["mean"], tensors["mask"]["sparsity"]) == (0.25, 0.75)
    assert result["total"]["numbers"] == 12 * 600 + 4 + 2 + 2 + 4


def test_for_a_reader(model: Path) -> None:
    shown = ckptkit("stats", model).stdout.splitlines()
    assert shown[0] == f"{model}: 17 tensors, 7,212 elements"
    assert shown[1].split() == [
        "norm",
        "mean",
        "std",
        "low",
        "high",
        "zero",
        "NaN",
        "Inf",
        "denormal",
        "module",
        "or",
        "tensor",
    ]
    assert any(line.endswith("model.layers.0-11.self_attn.q_proj.weight  x12") for line in shown)
    assert next(line for line in shown if line.endswith("broken")).split() == [
        "1",
        "0.5",
        "0.5",
        "0",
        "inf",
        "25%",
        "1",
        "1",
        "broken",
    ]
    assert shown[-1].endswith("all")
    each = ckptkit("stats", model, "--tensors", "--include", "*.q_proj.*").stdout.splitlines()
    assert len(each) == 2 + 12 + 1
    assert each[1].split() == ["norm", "mean", "std", "low", "high", "tensor"]


def test_the_table_fits_a_terminal(model: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-m", "ckptkit", "stats", str(model), "--tensors", "--include", "model*"]
    subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, check=True)
    os.close(theirs)
    shown = b""
    while b" all" not in shown:
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    assert max(map(len, shown.decode().splitlines()[1:])) <= 80


def test_usage(model: Path) -> None:
    assert ckptkit("stats", model, "--include", "absent").returncode == 2
    ran = ckptkit("stats", model, model, "--tensors")
    assert ran.returncode == 2
    assert "--include, --exclude and --tensors cannot be combined with OTHER" in ran.stderr
    assert ckptkit("stats", model / "absent").returncode == 3


def test_the_latest_of_a_run_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt-3").symlink_to(model)
    assert "the latest complete checkpoint of" in ckptkit("stats", tmp_path / "run").stderr
