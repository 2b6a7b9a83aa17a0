"""Ray Train: directories called by a date, and the file that says which of them Ray goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import Unsupported
from ckptkit.runs.ls import ls
from ckptkit.trainers.trackers import trackers_in

NAMES = ("checkpoint_2026-11-23_23-30-18.887563", "checkpoint_2026-11-23_23-30-18.922955")
SNAPSHOT = "checkpoint_manager_snapshot.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as `CheckpointManager` of Ray 2.56 leaves it; the first checkpoint is the best, the second the latest."""
    results = [
        {"version": 0, "checkpoint_dir_name": name, "metrics": {"loss": 0.5 + i}} for i, name in enumerate(NAMES)
    ]
    state = {"ray_version": "2.56.0", "checkpoint_results": results, "latest_checkpoint_result": results[1]}
    root = tmp_path / "run"
    for step, name in enumerate(NAMES):
        (root / name).mkdir(parents=True)
        torch.save({"model": {"weight": torch.full((2, 2), float(step))}, "step": step}, root / name / "model.pt")
    (root / SNAPSHOT).write_text(json.dumps(state))
    (root / ".validate_storage_marker").touch()
    return root


def test_the_tracker_names_the_latest(run: Path) -> None:
    assert [(one.name, one.target) for one in trackers_in(run)] == [(SNAPSHOT, NAMES[1])]
    assert [(one.path.name, one.named_by) for one in ls(run).checkpoints] == [(NAMES[0], ()), (NAMES[1], (SNAPSHOT,))]
    assert ckptkit.inspect(run / NAMES[1]).trainer == "a script of Ray Train"


def test_of_several_the_one_that_the_tracker_names_is_taken(run: Path, tmp_path: Path) -> None:
    done = ckptkit.consolidate(run, tmp_path / "hf")
    assert done.source == run / NAMES[1]
    assert ckptkit.open(tmp_path / "hf")["weight"].torch().tolist() == [[1, 1], [1, 1]]


def test_without_a_tracker_the_hint_names_none(run: Path) -> None:
    (run / SNAPSHOT).unlink()
    with pytest.raises(Unsupported) as caught:
        ckptkit.inspect(run)
    assert caught.value.hint == "pass one of them"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '"a"', '{"latest_checkpoint_result": null}', '{"latest_checkpoint_result": 7}', "[" * 9999],
)
def test_a_snapshot_that_says_nothing_means_nothing(run: Path, content: str) -> None:
    (run / SNAPSHOT).write_text(content)
    assert not any(tracker.target for tracker in trackers_in(run))
