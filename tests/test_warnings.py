"""Warnings name the user's line: Python prints the source of the line below the warning."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose latest-checkpoint file names another step than the highest."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    ckptkit.convert(tmp_path / "model.safetensors", tmp_path / "run" / "ckpt-1", to="dcp")
    shutil.copytree(tmp_path / "run" / "ckpt-1", tmp_path / "run" / "ckpt-2")
    (tmp_path / "run" / "latest").write_text("ckpt-1")
    return tmp_path / "run"


@pytest.mark.parametrize("call", [ckptkit.inspect, ckptkit.open, ckptkit.doctor, ckptkit.stats])
def test_a_warning_is_of_the_line_that_calls_ckptkit(run: Path, call: object) -> None:
    assert callable(call)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(run)
    assert said
    assert {one.filename for one in said} == {__file__}
