"""Which checkpoints a run has, which are complete, and which one a path means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import NotACheckpoint, Unsupported
from ckptkit.trainers import find_step_of_path, has_only_epoch_in_name
from tests import producers
from tests.conftest import Produce


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    """A run with two complete checkpoints, an unfinished newer one, and other things lying about."""
    root = tmp_path / "run"
    for step in (5, 10, 9):
        shutil.copytree(produce(producers.under_model).root, root / f"ckpt-{step}")
    shutil.copytree(produce(producers.under_model).root, root / "ckpt-11")
    (root / "ckpt-11" / ".metadata").unlink()
    (root / "ckpt-12").mkdir()
    (root / "logs").mkdir()
    (root / "metrics.jsonl").touch()
    return root


def test_only_complete_checkpoints_count(run: Path) -> None:
    assert [ckpt.step for ckpt in RunFolder(run).checkpoints()] == [5, 9, 10]
    latest = RunFolder(run).latest()
    assert latest is not None
    assert latest.path == run / "ckpt-10" == RunFolder(run).checkpoint(10)


def test_a_run_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "absent").checkpoints() == []
    assert RunFolder(tmp_path).latest() is None


def test_a_path_means_the_checkpoint_or_the_latest_of_the_run(run: Path) -> None:
    assert Checkpoint.open(run / "ckpt-5").model_component.path == run / "ckpt-5"
    assert Checkpoint.open(run).model_component.path == run / "ckpt-10"


def test_of_several_parts_the_model_is_meant(produce: Produce, tmp_path: Path) -> None:
    root = produce(producers.accelerate).root
    assert Checkpoint.open(root).model_component.path.name == "pytorch_model_fsdp_0"
    shutil.copytree(root, tmp_path / "run" / "checkpoint-7")
    assert (
        Checkpoint.open(tmp_path / "run").model_component.path
        == tmp_path / "run" / "checkpoint-7" / "pytorch_model_fsdp_0"
    )
    shutil.copytree(root / "pytorch_model_fsdp_0", tmp_path / "run" / "checkpoint-7" / "ema")
    with pytest.raises(Unsupported, match="ema, pytorch_model_fsdp_0"):
        _ = Checkpoint.open(tmp_path / "run").model_component.path


def test_a_model_and_the_rest_of_its_training_are_one_checkpoint(produce: Produce, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "ckpt-7"
    shutil.copytree(produce(producers.fsdp2).root, checkpoint / "training")
    save_file({"w": torch.ones(2)}, checkpoint / "model.safetensors")
    assert Checkpoint.open(tmp_path / "run").model_component.path == checkpoint
    assert [part.path for part in Checkpoint.at(checkpoint).components] == [checkpoint, checkpoint / "training"]
    (checkpoint / "training" / ".metadata").unlink()
    assert RunFolder(tmp_path / "run").latest() is None


def test_an_unfinished_part_makes_the_whole_incomplete(produce: Produce, tmp_path: Path) -> None:
    shutil.copytree(produce(producers.accelerate).root, tmp_path / "run" / "checkpoint-7")
    (tmp_path / "run" / "checkpoint-7" / "optimizer_0" / ".metadata").unlink()
    assert RunFolder(tmp_path / "run").latest() is None


def test_nothing_to_be_found(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no run with checkpoints"):
        _ = Checkpoint.open(run / "logs").model_component.path
    for step in (5, 9, 10):
        shutil.rmtree(run / f"ckpt-{step}")
    with pytest.raises(NotACheckpoint, match="unfinished: ckpt-11, ckpt-12"):
        _ = Checkpoint.open(run).model_component.path


@pytest.mark.parametrize(
    ("name", "step"),
    [("ckpt-500", 500), ("checkpoint-7", 7), ("step-1000", 1000), ("global_step3", 3), ("iter_0000100", 100)],
)
def test_directory_names_of_trainers(name: str, step: int) -> None:
    assert find_step_of_path(Path("run") / name) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("step_5_ckp", 5), ("ep1-ba5", 5), ("epoch_1_step_5", 5), ("epoch=1-step=5", 5), ("step=5.ckpt", 5)),
        ("model--val_loss=2.50-step=5-consumed_samples=40.0-last", 5),
    ],
)
def test_directory_names_with_a_step_among_others(name: str, step: int) -> None:
    assert find_step_of_path(Path(name)) == step
    assert not has_only_epoch_in_name(Path(name))


@pytest.mark.parametrize(("name", "epoch"), [("epoch-3", 3), ("epoch_3", 3), ("epoch=3.ckpt", 3)])
def test_an_epoch_is_no_step(name: str, epoch: int) -> None:
    assert find_step_of_path(Path(name)) == epoch
    assert has_only_epoch_in_name(Path(name))


@pytest.mark.parametrize(
    "name",
    [
        *("ckpt-", "ckpt-5-old", ".ckpt-5.ckptkit.tmp", "final", "5", "ba5x", "best-step=", "footstep=5", "ep1"),
        *(".epoch=1-step=5.ckptkit.tmp", ".step=5.leaving", "step-\u0665", "ckpt-" + "9" * 19),
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert find_step_of_path(Path("run") / name) is None
