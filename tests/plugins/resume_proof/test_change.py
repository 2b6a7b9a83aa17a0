"""A changed copy differs in one group of state, and is a valid checkpoint."""

from __future__ import annotations

import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckptkit
from ckptkit.plugins.resume_proof.change import CHANGES, change_state_group, changed_value, freeze_optimizer
from ckptkit.plugins.resume_proof.compare import group_differences
from ckptkit.plugins.resume_proof.states import (
    DATA,
    MOMENTS,
    OPTIONS,
    OTHER,
    SCALER,
    SCHEDULER,
    SETTINGS,
    list_damage,
    read_checkpoint_contents,
    state_group_of,
)

Write = Callable[[dict[str, Any], Path], None]


def make_state() -> dict[str, Any]:
    """A training after some steps, with a state of every group."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": {name: weight.detach() for name, weight in model.named_parameters()},
        "optim": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.Random(0).getstate(),
            "numpy": np.random.RandomState(0).get_state(),
        },
        "dataloader": {"position": 12, "dp_rank_0": pickle.dumps({"sample_idx": 3}), "world_size": 2},
        "scaler": {"scale": 1024.0, "_growth_tracker": 3},
        "ema": {"weight": torch.ones(4, 4, dtype=torch.bfloat16)},
        "step": 3,
    }


def write_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch warns that it saves in one process
        dcp.save(state, checkpoint_id=path, no_dist=True)


def write_pt(state: dict[str, Any], path: Path) -> None:
    path.mkdir()
    torch.save(state, path / "state.pt")


def write_files(state: dict[str, Any], path: Path) -> None:
    """As the Trainer of transformers does: a file for each."""
    path.mkdir()
    save_file(state["model"], path / "model.safetensors")
    torch.save(state["optim"], path / "optimizer.pt")
    torch.save(state["scheduler"], path / "scheduler.pt")
    torch.save(state["rng"], path / "rng_state_0.pth")
    torch.save({"scale": 1024.0}, path / "scaler.pt")
    torch.save({"dataloader": {"position": 12}, "ema": state["ema"]}, path / "extra_0.pt")
    (path / "trainer_state.json").write_text('{"global_step": 3, "log_history": [{"step": 1}]}')


@pytest.mark.parametrize("write", [write_dcp, write_pt, write_files])
def test_each_group_changes_alone(tmp_path: Path, write: Write) -> None:
    source = tmp_path / "step_3"
    write(make_state(), source)
    before = read_checkpoint_contents(source)
    assert set(CHANGES) <= set(before.groups)
    for group in CHANGES:
        copy = tmp_path / group / "step_3"
        shutil.copytree(source, copy)
        assert change_state_group(copy, group) > 0
        assert [gap.group for gap in group_differences(before, read_checkpoint_contents(copy))] == [group]
        assert list_damage(copy) == []


def test_torch_reads_what_was_changed(tmp_path: Path) -> None:
    state = make_state()
    write_dcp(state, tmp_path / "step_3")
    for group in CHANGES:
        change_state_group(tmp_path / "step_3", group)
    loaded = make_state()
    with warnings.catch_warnings(action="ignore"):
        dcp.load(loaded, checkpoint_id=tmp_path / "step_3", no_dist=True)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"] * 1.25)
    assert torch.equal(loaded["ema"]["weight"], state["ema"]["weight"] * 1.25)
    assert torch.equal(loaded["optim"]["state"][0]["exp_avg"], state["optim"]["state"][0]["exp_avg"] * 4)
    assert loaded["optim"]["state"][0]["step"] == 4
    assert loaded["optim"]["param_groups"][0]["lr"] == state["optim"]["param_groups"][0]["lr"] / 2
    assert loaded["scheduler"]["last_epoch"] == 4
    assert loaded["step"] == 4
    assert pickle.loads(loaded["dataloader"]["dp_rank_0"]) == {"sample_idx": 4}
    assert loaded["dataloader"]["world_size"] == 2
    torch.set_rng_state(loaded["rng"]["torch"])
    random.setstate(loaded["rng"]["python"])
    moved, before = (np.random.RandomState(0) for _ in range(2))
    moved.set_state(loaded["rng"]["numpy"])
    assert moved.random() != before.random()


def test_settings_are_no_state(tmp_path: Path) -> None:
    write_pt({**make_state(), "config": {"seed": 1, "dataset": 2, "scheduler": 3}}, tmp_path / "step_3")
    entries = read_checkpoint_contents(tmp_path / "step_3").values
    assert {entries[name].group for name in entries if "config" in name} == {SETTINGS}


def test_a_manifest_is_made_right(tmp_path: Path) -> None:
    write_dcp(make_state(), tmp_path / "step_3")
    ckptkit.make_manifest(tmp_path / "step_3")
    change_state_group(tmp_path / "step_3", OPTIONS)
    assert list_damage(tmp_path / "step_3") == []


def test_a_frozen_optimizer_has_no_learning_rate(tmp_path: Path) -> None:
    for name in ("before", "frozen"):
        (tmp_path / name).mkdir()
        write_pt(make_state(), tmp_path / name / "step_3")
    freeze_optimizer(tmp_path / "frozen" / "step_3")
    loaded = torch.load(tmp_path / "frozen" / "step_3" / "state.pt", weights_only=False)
    group = loaded["optim"]["param_groups"][0]
    assert (group["lr"], group["weight_decay"]) == (0, 0)
    assert min(group["betas"]) > 0.999999
    before, frozen = (read_checkpoint_contents(tmp_path / name / "step_3") for name in ("before", "frozen"))
    gaps = group_differences(before, frozen)
    assert [gap.group for gap in gaps] == [OPTIONS, SCHEDULER]


def test_files_are_read_one_by_one_if_no_format_joins_them(tmp_path: Path) -> None:
    state = make_state()
    write_files(state, tmp_path / "step_3")
    (tmp_path / "step_3" / "model.safetensors").unlink()
    torch.save(state["model"], tmp_path / "step_3" / "pytorch_model.bin")
    found = read_checkpoint_contents(tmp_path / "step_3")
    assert set(CHANGES) <= set(found.groups)
    assert found.unread


@pytest.mark.parametrize(
    ("path", "group"),
    [("pos", DATA), ("train.position", DATA), ("optim.state.pos.exp_avg", MOMENTS), ("position_ids", OTHER)],
)
def test_a_position_is_told_by_its_whole_name(path: str, group: str) -> None:
    assert state_group_of(path.split("."), is_tensor=True) == group


def test_a_lowered_loss_scale_does_not_grow_back_within_a_few_steps() -> None:
    assert changed_value(SCALER, "scaler.scale", 2.0**16) == 2.0**6
    assert changed_value(SCALER, "scaler.backoff_factor", 0.5) == 0.25
