"""Trees as LLaMA-Factory 0.9.5 leaves them with `USE_V1=1`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.runs.ls import ls
from tests.producers import save_alone

WEIGHT = {"model.norm.weight": torch.ones(4)}
STATE = {
    "state": {"model.norm.weight": {"exp_avg": torch.ones(4), "step": torch.tensor(2.0)}},
    "param_groups": [{"params": ["model.norm.weight"], "lr": 0.1}],
}
OF_RANKS = [f"{folder}/rank_{rank}.pt" for folder in ("dataloader", "rng_state") for rank in range(2)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = tmp_path / "run" / "checkpoint-2"
    save_alone(WEIGHT, place / "model")
    save_alone(STATE, place / "optimizer")
    (place / "metadata.json").write_text(json.dumps({"global_step": 2, "epoch": 0, "num_training_steps": 4}))
    torch.save({"last_epoch": 2}, place / "scheduler.pt")
    for name in OF_RANKS:
        (place / name).parent.mkdir(exist_ok=True)
        torch.save({"state": torch.ones(3)}, place / name)
    (place / "CHECKPOINT_COMPLETE").touch()
    return place


def test_states_of_ranks_are_copied_unchanged(checkpoint: Path, tmp_path: Path) -> None:
    assert ckptkit.inspect(checkpoint).trainer == "LLaMA-Factory"
    assert [one.step for one in ls(checkpoint.parent).checkpoints] == [2]
    done = ckptkit.reshard(checkpoint, tmp_path / "out", to=4)
    assert {"model/.metadata", "optimizer/.metadata", "CHECKPOINT_COMPLETE", *OF_RANKS} <= done.files.keys()
    assert not done.left_behind


def test_consolidate_leaves_only_training_state(checkpoint: Path, tmp_path: Path) -> None:
    done = ckptkit.consolidate(checkpoint, tmp_path / "out", names="keep", strict=True)
    assert {left.why for left in done.left_behind} == {"training state"}
    assert {"CHECKPOINT_COMPLETE", "metadata.json"} <= {left.name for left in done.left_behind}


def test_prune_names_only_what_others_put_there(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-4"))
    (checkpoint / "notes.txt").touch()
    (gone,) = ckptkit.prune(checkpoint.parent, keep_last=1).delete
    assert gone.reason == "no rule keeps it; it also contains notes.txt"


def test_one_process_saves_as_transformers(checkpoint: Path) -> None:
    for place in (checkpoint / "model", checkpoint / "optimizer"):
        for path in place.iterdir():
            path.unlink()
    save_file(WEIGHT, checkpoint / "model" / "model.safetensors")
    torch.save({"state": {}, "param_groups": [{"params": [0]}]}, checkpoint / "optimizer" / "state_dict.pt")
    assert ckptkit.inspect(checkpoint).trainer == "LLaMA-Factory"
