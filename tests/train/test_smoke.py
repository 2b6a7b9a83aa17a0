"""The whole road on two processes, and that its checks do find what is wrong."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.errors import Occupied
from ckptkit.runs import Run
from ckptkit.train.config import TrainConfig
from ckptkit.train.model_config import ModelConfig
from ckptkit.train.smoke import CHECKS, Check, Trial, make, smoke
from tests.train.test_commands import ckptkit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which `ckptkit smoke --json` left run/, out/ and what it printed."""
    root = tmp_path_factory.mktemp("smoke")
    done = ckptkit(root, "smoke", "--json", "--untied", "--device", "cpu")
    assert done.returncode == 0, done.stderr + done.stdout
    (root / "printed.json").write_text(done.stdout)
    return root


@pytest.fixture
def trial(made: Path, tmp_path: Path) -> Trial:
    """A copy of what smoke left, to damage."""
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.copytree(made / "out", tmp_path / "out")
    return Trial(TrainConfig(run=tmp_path / "run", model=ModelConfig.sized("tiny", tied=False)), 2, tmp_path / "out")


def check(trial: Trial, name: str) -> Check:
    return make(name, lambda: CHECKS[name](trial))


def test_all_checks_pass_and_leave_run_and_export(made: Path) -> None:
    printed = json.loads((made / "printed.json").read_text())
    assert printed["ok"] is True
    assert [check["name"] for check in printed["checks"]] == list(CHECKS)
    for found in printed["checks"]:
        assert list(found) == ["name", "ok", "detail", "seconds"]
        assert found["ok"] is not False
        assert found["detail"]
    assert [checkpoint.step for checkpoint in Run(made / "run").checkpoints()] == [4, 8]
    assert len(load_file(made / "out/model.safetensors")) == 21


def test_a_changed_weight_is_found(trial: Trial) -> None:
    path = trial.out / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    found = check(trial, "equal tensors")
    assert found.ok is False
    assert found.detail == "1 of 21 tensors differ, first `model.layers.1.mlp.up_proj.weight`"
    assert check(trial, "equal logits").ok is False
    assert check(trial, "equal logits in transformers").ok is not True


def test_a_lost_tensor_is_found(trial: Trial) -> None:
    path = trial.out / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, path, {"format": "pt"})
    for name in ("equal tensors", "equal logits"):
        found = check(trial, name)
        assert found.ok is False
        assert "lm_head.weight" in found.detail


def test_losses_that_rise_or_are_missing_are_found(trial: Trial) -> None:
    lines = [json.dumps({"step": step, "loss": float(step)}) for step in range(1, 9)]
    (trial.config.run / "metrics.jsonl").write_text("\n".join(lines))
    assert check(trial, "loss falls").ok is False
    assert check(trial, "losses are finite").ok is True
    (trial.config.run / "metrics.jsonl").write_text("\n".join(lines[:5]))
    assert check(trial, "losses are finite").detail == check(trial, "loss falls").detail == "5 of 8 losses"


def test_what_was_never_made_fails_every_check_with_a_reason(tmp_path: Path) -> None:
    absent = Trial(TrainConfig(run=tmp_path / "run"), 2, tmp_path / "out")
    for name in list(CHECKS)[1:]:
        found = check(absent, name)
        assert found.ok is False, name
        assert found.detail


def test_a_damaged_shard_fails_consolidation_and_names_the_file(trial: Trial) -> None:
    (shard, *_) = sorted(trial.checkpoint.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    found = check(trial, "consolidate")
    assert found.ok is False
    assert shard.name in found.detail


def test_nothing_but_an_earlier_smoke_is_replaced(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "precious").touch()
    with pytest.raises(Occupied, match="not made by smoke"):
        smoke(run, out, overwrite=True)
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(Occupied, match="exists"):
        smoke(tmp_path / "another", out)
    assert (run / "precious").exists()
    assert not (tmp_path / "another").exists()


def test_the_last_checkpoint_is_the_one_compared(trial: Trial) -> None:
    shutil.rmtree(trial.checkpoint)
    earlier = Trial(replace(trial.config), 2, trial.out)
    assert earlier.checkpoint.name == "ckpt-4"
    assert not torch.equal(earlier.trained.lm_head.weight, trial.exported["lm_head.weight"])
