"""The trees in which wrappers put DeepSpeed's directories: the run, the checkpoint and the tag all mean the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Unsupported
from tests.conftest import Produce
from tests.trainers import produced_zero as zero

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


def save_trainer(run: Path, saved: Path) -> Path:
    """What transformers' Trainer leaves: DeepSpeed's own directory, the 16-bit weights and small files beside it."""
    root = run / "checkpoint-2"
    shutil.copytree(saved, root)
    (root / "trainer_state.json").write_text(json.dumps({"log_history": [], "global_step": 2}))
    (root / "config.json").write_text(json.dumps({"model_type": "toy", "architectures": ["Toy"]}))
    for rank in range(2):
        torch.save({}, root / f"rng_state_{rank}.pth")
    torch.save([1], root / "training_args.bin")
    models = list(root.glob("global_step2/mp_rank_00_model_states.pt"))
    if models:
        module = torch.load(models[0], weights_only=False)["module"]
        save_file({name: value.clone() for name, value in module.items()}, root / "model.safetensors")
    return root


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_of_transformers_trainer(kind: str, tmp_path: Path, produce: Produce) -> None:
    made = produce(zero.on_two)
    root = save_trainer(tmp_path / "run", made.root / kind)
    for source in (tmp_path / "run", root, root / "global_step2"):
        found = Checkpoint.open(source)
        assert (found.layout.format, found.step, found.world_size) == ("deepspeed", 2, 2)
        assert found.trainer == found.trainer_by_file_names == "DeepSpeed, by transformers' Trainer"
        assert found.companions.found_in == root
    (listed,) = ckptkit.ls(tmp_path / "run").checkpoints
    assert (listed.path, listed.step, listed.world_size, listed.is_complete) == (root, 2, 2, True)
    assert [one.path for one in ckptkit.ls(root).checkpoints] == [root]
    assert not any(one.problems for one in ckptkit.verify(tmp_path / "run"))
    ckptkit.consolidate(root, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    name = "embed.weight"
    assert torch.equal(weights[name], made.truth[f"{kind}/model.{name}"])
    assert (tmp_path / "out" / "config.json").exists()


def test_a_conversion_of_such_a_tree_is_found_again(tmp_path: Path, produce: Produce) -> None:
    root = save_trainer(tmp_path / "run", produce(zero.on_two).root / "zero2")
    ckptkit.convert(root, tmp_path / "out", to="dcp")
    assert Checkpoint.open(tmp_path / "out").layout.format == "dcp"  # and not the 16-bit copy beside it
    assert ckptkit.diff(tmp_path / "out", root).is_equal


def test_two_saves_in_one_checkpoint_are_not_guessed_at(tmp_path: Path, produce: Produce) -> None:
    root = save_trainer(tmp_path / "run", produce(zero.on_two).root / "zero3")
    shutil.copytree(root / "global_step2", root / "global_step3")
    with pytest.raises(Unsupported, match="several checkpoints"):
        _ = Checkpoint.open(root).layout
    assert Checkpoint.open(root / "global_step3").step == 3


def test_a_run_with_the_weights_beside_its_checkpoints_stays_a_run(tmp_path: Path, produce: Produce) -> None:
    run = shutil.copytree(produce(zero.on_two).root / "zero3", tmp_path / "run")
    shutil.copytree(run / "global_step2", run / "global_step4")
    save_file({"w": torch.ones(2)}, run / "model.safetensors")
    assert [one.step for one in ckptkit.ls(run).checkpoints] == [2, 4]


@pytest.mark.parametrize(
    ("place", "tag", "step", "trainer"),
    [("out", "pytorch_model", None, "Accelerate"), ("epoch=0-step=2.ckpt", "checkpoint", 2, "DeepSpeed")],
)
def test_of_other_wrappers(place: str, tag: str, step: int, trainer: str, tmp_path: Path, produce: Produce) -> None:
    root = tmp_path / "run" / place
    shutil.copytree(produce(zero.on_two).root / "zero3" / "global_step2", root / tag)
    (root / "latest").write_text(tag)
    for source in (root, root / tag):
        found = Checkpoint.open(source)
        assert (found.layout.format, found.step, found.world_size) == ("deepspeed", step, 2)
        assert found.trainer == trainer


def test_of_openrlhf(tmp_path: Path, produce: Produce) -> None:
    run = tmp_path / "run"
    shutil.copytree(produce(zero.on_two).root / "zero2", run)
    (run / "global_step2" / "metric.json").write_text(json.dumps({"metric_key": None, "metric_value": None}))
    for source in (run, run / "global_step2"):
        found = ckptkit.inspect(source)
        assert found.trainer == "OpenRLHF, by DeepSpeed"
        assert {left.why for left in found.left_behind} <= {"training state"}


def test_the_best_of_openrlhf_is_not_counted(tmp_path: Path, produce: Produce) -> None:
    run = tmp_path / "run"
    shutil.copytree(produce(zero.on_two).root / "zero2", run)
    for name in ("best_global_step3", "global_step4"):
        shutil.copytree(run / "global_step2", run / name)
        (run / name / "metric.json").write_text(json.dumps({"metric_key": "reward", "metric_value": 0.5}))
    (run / "latest").write_text("global_step4")
    pruned = ckptkit.prune(run, keep_last=2)
    assert [entry.path.name for entry in pruned.keep] == ["global_step4", "global_step2"]
    assert not pruned.delete
