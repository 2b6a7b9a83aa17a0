"""Rounded copies beside the weights: held against them, and taken in their place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.errors import Mismatch, Usage
from tests.command import ckptkit as run_cli
from tests.conftest import Produce
from tests.trainers import produced_zero as zero

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

FILE = "global_step2/mp_rank_00_model_states.pt"


def test_the_copies_are_the_weights_on_request(tmp_path: Path, produce: Produce) -> None:
    root = produce(zero.on_two).root / "zero1"
    module = torch.load(root / FILE, weights_only=False)["module"]
    ckptkit.consolidate(root, tmp_path / "out", weights_from="module")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in module.items():
        assert name not in weights or torch.equal(weights[name], value)
    assert weights["down.weight"].dtype == torch.bfloat16
    # the same as the masters cast
    ckptkit.consolidate(root, tmp_path / "cast", dtype=["*=bf16", "frequencies=fp32"])
    assert ckptkit.diff(tmp_path / "out", tmp_path / "cast").is_equal
    # the optimizer stays what it is
    done = ckptkit.convert(root, tmp_path / "dcp", to="dcp", weights_from="module")
    assert done.tensors == len(ckptkit.open(root))
    assert ckptkit.open(tmp_path / "dcp")["model.down.weight"].torch().dtype == torch.bfloat16
    assert ckptkit.diff(tmp_path / "dcp", root, include=["optimizer.*"]).is_equal


def test_without_copies_there_is_nothing_to_take(tmp_path: Path, produce: Produce) -> None:
    root = produce(zero.on_two).root / "zero3"
    with pytest.raises(Mismatch, match="does not have a second copy"):
        ckptkit.consolidate(root, tmp_path / "out", weights_from="module")
    with pytest.raises(Usage):
        ckptkit.consolidate(root, tmp_path / "out", weights_from="ema")
    assert not (tmp_path / "out").exists()


def test_a_copy_that_is_not_the_weight_rounded_is_a_problem(tmp_path: Path, produce: Produce) -> None:
    root = Path(shutil.copytree(produce(zero.on_two).root / "zero1", tmp_path / "run"))
    assert run_cli("verify", root).returncode == 0
    state = torch.load(root / FILE, weights_only=False)
    state["module"]["down.weight"][2, 3] += 1
    torch.save(state, root / FILE)
    assert ckptkit.verify(root, fast=True)[0].problems == ()
    done = run_cli("verify", root, "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 1
    assert problem["tensor"] == "model.down.weight"
    assert problem["message"].startswith("1 of 42 elements differ from the copy in bfloat16, by up to ")
