"""Files that lie beside a checkpoint and are not it: an EMA, a value head."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit import consolidate
from ckptkit.checkpoints.checkpoint import Checkpoint
from tests.faults.meaning_sources import FORMATS, STEP, model

STRAYS = {"ema.safetensors": model(8), "value_head.safetensors": {"v_head.weight": torch.ones(1, 8)}}
OF_STATES = ("pt", "ranks", "zero2", "universal", "accelerate-fsdp")


@pytest.mark.parametrize("name", STRAYS)
@pytest.mark.parametrize("kind", OF_STATES)
def test_safetensors_beside_a_whole_state_are_not_the_model(kind: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / f"ckpt-{STEP}"
    FORMATS[kind].make(source, {})
    save_file(STRAYS[name], source / name)
    consolidate(source, tmp_path / "out", names="keep")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == model().keys()
    assert all(torch.equal(made[name], value) for name, value in model().items())


def test_a_file_beside_directories_of_model_and_optimizer_is_not_the_model(tmp_path: Path) -> None:
    source = tmp_path / f"ckpt-{STEP}"
    FORMATS["accelerate-fsdp"].make(source, {})
    torch.save({"ema": model(8)}, source / "ema.pt")
    assert Checkpoint.open(source).model_component.path.name == "pytorch_model_fsdp_0"
    shutil.rmtree(source / "optimizer_0")
    shutil.rmtree(source / "pytorch_model_fsdp_0")
    assert Checkpoint.open(source).model_component.path == source


def test_safetensors_of_any_name_are_a_model_where_nothing_else_is(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "weights.safetensors")
    torch.save({"ema": model(8)}, tmp_path / "ema.pt")
    assert Checkpoint.open(tmp_path).layout.format == "hf"
    torch.save({"model": model(8)}, tmp_path / "state.pt")
    assert Checkpoint.open(tmp_path).layout.format == "pt"
