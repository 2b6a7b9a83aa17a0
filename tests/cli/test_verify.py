"""`ckptkit verify` and `ckptkit manifest` as their users see them: exit codes, tables and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce


@pytest.fixture
def checkpoint(produce: Produce, tmp_path: Path) -> Path:
    return Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "checkpoint"))


def damage(checkpoint: Path) -> None:
    path = checkpoint / "__1_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(4) + data[len(data) // 2 + 4 :])
    path.with_name("__0_0.distcp").unlink()


def test_a_whole_checkpoint(checkpoint: Path) -> None:
    done = ckptkit("verify", checkpoint)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].startswith("ok ")


def test_a_run_beside_a_model_is_named_as_that(produce: Produce, tmp_path: Path) -> None:
    for step in (5, 10):
        shutil.copytree(produce(producers.fsdp2).root, tmp_path / "run" / f"ckpt-{step}")
    shutil.copytree(produce(producers.hf_alone).root, tmp_path / "model")
    done = ckptkit("verify", ".", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].endswith(" model")
    assert "note: .: not checked: run (a run with checkpoints of its own)\n" in done.stderr


def test_json_lists_every_problem(checkpoint: Path) -> None:
    damage(checkpoint)
    done = ckptkit("verify", checkpoint, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["ok"] is False
    assert len(found["problems"]) >= 2
    assert {"code", "path", "tensor", "offset", "message", "hint"} == found["problems"][0].keys()
    assert {"checked_bytes", "unchecked_bytes"} <= found.keys()


def test_problems_are_listed_for_readers(checkpoint: Path) -> None:
    damage(checkpoint)
    done = ckptkit("verify", checkpoint, "--stats")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert f"problem: {checkpoint}: 1 of 3 files are missing: __0_0.distcp" in lines
    assert "nothing else was checked" in done.stderr


@pytest.mark.slow
def test_a_note_on_families_is_printed_once(tmp_path: Path) -> None:
    """Two checkpoints are held against one whose names had to become the Hub's for either."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 2}
    own = {"tok_embeddings.weight": torch.ones(3, 4), "layers.0.attention.wq.weight": torch.ones(4, 4)}
    hub = {"model.embed_tokens.weight": torch.ones(3, 4), "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}
    for place, tensors in (("one", hub), ("two", hub), ("other", own)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / place / "model.safetensors")
    done = ckptkit("verify", tmp_path / "one", tmp_path / "two", "--against", tmp_path / "other")
    assert done.stderr.count("translated 2 tensors from the names of torchtitan-0.2 to 2 of the Hub") == 1


def test_what_is_none_and_what_is_there_already(checkpoint: Path, tmp_path: Path) -> None:
    assert ckptkit("verify", tmp_path / "missing").returncode == 3
    assert ckptkit("manifest", checkpoint).returncode == 0
    again = ckptkit("manifest", checkpoint)
    assert again.returncode == 5
    assert "hint: " in again.stderr


def test_a_conversion_is_proved(checkpoint: Path, tmp_path: Path) -> None:
    assert ckptkit("consolidate", checkpoint, tmp_path / "out", "--dtype", "bf16").returncode == 0
    refused = ckptkit("verify", tmp_path / "out", "--against", checkpoint)
    assert refused.returncode == 1
    assert "hint: pass --allow-cast" in refused.stdout
    proved = ckptkit("verify", tmp_path / "out", "--against", checkpoint, "--allow-cast", "--json")
    assert proved.returncode == 0
    assert json.loads(proved.stdout)["compared"][0]["tensors"] > 0


def test_numbers_are_counted(checkpoint: Path) -> None:
    done = ckptkit("verify", checkpoint, "--stats", "--json")
    stats = json.loads(done.stdout)["stats"]
    assert done.returncode == 0
    assert {"name", "spec", "nan", "inf", "zero", "denormal", "low", "high"} <= stats[0].keys()
    assert "tensors of" in ckptkit("verify", checkpoint, "--stats").stdout or "tensor of" in done.stdout
