"""`ckptkit prove` on the command line: its verdict, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ckptkit.conversion.convert import consolidate
from tests.command import ckptkit
from tests.plugins.prove.test_prove import train

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow


def prove(*arguments: object) -> subprocess.CompletedProcess[str]:
    return ckptkit("prove", *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.slow
def test_proved(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out", dtype="bf16")
    done = prove(tmp_path / "out", "--against", source.parent, "--tokens", "1,2,3")
    assert done.returncode == 0
    tensors, logits, verdict = done.stdout.splitlines()
    assert tensors.startswith("the tensors are the same: 36 tensors, ")
    assert logits.startswith("the logits of 3 tokens, with rounded weights: mean KL ")
    assert verdict == f"proved: {tmp_path / 'out'} computes the same as {source}, up to rounding (tried with 3 tokens)"
    assert "36 tensors were converted to be compared" in done.stderr


@pytest.mark.slow
def test_not_proved(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out")
    (tmp_path / "out" / "ckptkit.json").unlink()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] *= -1
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    done = prove(tmp_path / "out", "--against", source)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("the tensors are not the same: model.layers.1.self_attn.q_proj.weight; ")
    assert lines[1].endswith("; model.layers.1 is the first block to differ")
    assert lines[2].endswith("differ in tensors and logits (tried with 64 tokens)")
    found = json.loads(prove(tmp_path / "out", "--against", source, "--json").stdout)
    assert (found["ok"], found["logits"]["first"]) == (False, "model.layers.1")
    assert found["tensors"][0]["different"] == ["model.layers.1.self_attn.q_proj.weight"]
