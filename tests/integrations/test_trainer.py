"""Saves of transformers' Trainer in the background: its own files, complete or absent; it resumes from them."""

from __future__ import annotations

import json
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import CkptError, Unsupported
from tests.integrations.test_transformers import make_trainer, shard
from tests.producers import save_alone, spawn
from tests.s3 import Place
from tests.trainers.produced_lightning import be_torchrun

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

OURS = {"config.json", "ckptkit.json"}  # that the Trainer's own checkpoint lacks


def background(home: str | Path, **options: Any) -> Any:
    """Return a Trainer of this rank under FSDP2 that saves in the background."""
    from ckptkit.integrations.trainer import BackgroundTrainer

    return plain(home, trainer_class=BackgroundTrainer, **options)


def plain(home: str | Path, **options: Any) -> Any:
    """Return the same Trainer with its own saves."""
    from ckptkit.integrations.transformers import CkptkitCallback

    trainer = make_trainer(home, use_cpu=True, save_steps=1, **options)
    trainer.remove_callback(CkptkitCallback)
    shard(trainer)
    return trainer


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in trainer.model.state_dict().items()}


def _save_both_ways(home: Path) -> None:
    be_torchrun()
    for make in (plain, background):
        trainer = make(home / make.__name__)
        trainer.train()
    weights = trained(trainer)
    for make in (plain, background):  # each goes on from the other's checkpoint
        trainer = make(home / f"from-{make.__name__}")
        source = home / (background if make is plain else plain).__name__ / "checkpoint-2"
        trainer.train(resume_from_checkpoint=str(source))
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained(trainer).items())
    if dist.get_rank() == 0:
        torch.save(weights, home / "truth.pt")


def test_checkpoints_are_those_of_the_trainer(tmp_path: Path) -> None:
    spawn(2, _save_both_ways, tmp_path)
    for step in range(1, 5):
        theirs, ours = (tmp_path / make / f"checkpoint-{step}" for make in ("plain", "background"))
        expected, files = ({str(path.relative_to(root)) for path in root.rglob("*")} for root in (theirs, ours))
        assert {name for name in expected - files if not name.endswith(".distcp")} == set()
        assert {Path(name).name for name in files - expected if not name.endswith(".distcp")} == OURS
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            both = [dcp.FileSystemReader(root / part).read_metadata().state_dict_metadata for root in (theirs, ours)]
            assert both[0].keys() == both[1].keys()
        assert json.loads((ours / "trainer_state.json").read_text())["global_step"] == step
        assert all(part.is_ok for part in verify(ours))
    consolidate(tmp_path / "background" / "checkpoint-4", tmp_path / "model")
    made = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    truth = torch.load(tmp_path / "truth.pt")
    assert all(torch.equal(made[name], tensor) for name, tensor in truth.items())


def train_with_best_second(home: str | Path) -> Any:
    """Train with evaluations that say that the second checkpoint is the best, and keep one more."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = background(home, **options)
    losses = iter([3.0, 1.0, 2.0, 4.0])
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **more: {**evaluate(*args, **more), "eval_loss": next(losses)}
    trainer.train()
    assert trainer.state.best_model_checkpoint == f"{home}/checkpoint-2"
    return trainer


def _keep_two(home: Path) -> None:
    be_torchrun()
    train_with_best_second(home)
    dist.barrier()
    assert [path.name for path in sorted(home.glob("checkpoint-*"))] == ["checkpoint-2"]


def test_the_best_checkpoint_stays_and_is_loaded(tmp_path: Path) -> None:
    spawn(2, _keep_two, tmp_path / "run")


def _fail(home: Path) -> None:
    be_torchrun()
    trainer = background(home, max_grad_norm=0.0)
    step = trainer.training_step

    def step_without_room(*arguments: Any) -> Any:
        """Leave rank 1 no room for its shards of the second checkpoint, but for its random state."""
        if trainer.state.global_step == 1 and dist.get_rank() == 1:
            trainer.wait_for_save()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return step(*arguments)

    trainer.training_step = step_without_room
    with pytest.raises(CkptError, match="file too large") as raised:
        trainer.train()
    assert raised.value.path == home / "checkpoint-2/pytorch_model_fsdp_0/__1_0.distcp"
    assert trainer.state.global_step == 3
    dist.barrier()


def test_a_save_that_fails_on_one_rank_raises_on_all_and_leaves_no_files(tmp_path: Path) -> None:
    spawn(2, _fail, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def _save_in_the_foreground(home: Path) -> None:
    be_torchrun()
    trainer = background(home)
    notes = home / "checkpoint-2" / "notes.txt"
    if dist.get_rank() == 0:
        notes.parent.mkdir(parents=True)
        notes.touch()
    dist.barrier()
    with pytest.warns(match="checkpoint-2 exists, so the training waits until checkpoint-2 is written"):
        trainer.train()
    assert notes.exists()
    assert (notes.parent / "trainer_state.json").exists()
    shard(trainer, "FULL_STATE_DICT")
    trainer.state.global_step = 5
    with pytest.warns(match="FULL_STATE_DICT, not SHARDED_STATE_DICT, so the training waits"):
        trainer._save_checkpoint(trainer.model, None)
    assert (home / "checkpoint-5" / "pytorch_model_fsdp.bin").is_file()


def test_a_full_state_dict_and_a_directory_that_exists_are_saved_by_the_trainer_itself(tmp_path: Path) -> None:
    spawn(2, _save_in_the_foreground, tmp_path / "run")


def _save_to_store(home: Path, run: str, env: dict[str, str]) -> None:
    be_torchrun()
    os.environ.update(env)
    os.chdir(home)
    trainer = plain(home / "plain")
    trainer.train()
    weights = trained(trainer)
    best = trained(train_with_best_second(run))
    assert not any(torch.equal(weights[name], tensor) for name, tensor in best.items())
    for source, steps in ((f"{run}/checkpoint-2", 2), (True, 0)):  # the latest is at the last step
        trainer = background(run)
        started: list[Any] = []
        trainer.training_step = partial(count_and_call, started, trainer.training_step)
        trainer.train(resume_from_checkpoint=source)
        assert len(started) == steps
        assert trainer.state.best_model_checkpoint == f"{run}/checkpoint-2"
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained(trainer).items())


def test_only_checkpoints_of_the_trainer_are_deleted_in_a_store(tmp_path: Path) -> None:
    from ckptkit.integrations.trainer import checkpoints_over_limit

    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3", "ckpt-1", "step_2"):
        save_alone({"model": {"w": torch.ones(2)}}, tmp_path / name)
    assert checkpoints_over_limit(tmp_path / "checkpoint-3", 2, None) == [tmp_path / "checkpoint-1"]
    assert checkpoints_over_limit(tmp_path / "checkpoint-3", 1, str(tmp_path / "checkpoint-1")) == [
        tmp_path / "checkpoint-2"
    ]


def count_and_call(calls: list[None], function: Any, *arguments: Any) -> Any:
    calls.append(None)
    return function(*arguments)


def names_in_store(place: Place) -> set[str]:
    return {name.split("/")[2] for name in place.files.find(f"{place.name}/run", refresh=True)}


def test_a_store_is_saved_to_and_resumed_from(place: Place, tmp_path: Path) -> None:
    run = f"s3://{place.name}/run"
    spawn(2, _save_to_store, tmp_path, run, place.server.env)
    assert names_in_store(place) == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    for step in (2, 3, 4):
        assert all(part.is_ok and part.has_manifest for part in verify(f"{run}/checkpoint-{step}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "run"]


def test_one_process_saves_its_full_model_to_a_store(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptkit.integrations.trainer import BackgroundTrainer
    from ckptkit.integrations.transformers import CkptkitCallback

    monkeypatch.chdir(tmp_path)
    run = f"s3://{place.name}/run"
    options: dict[str, Any] = {
        "trainer_class": BackgroundTrainer,
        "use_cpu": True,
        "save_steps": 1,
        "save_total_limit": 2,
    }
    trainer = make_trainer(run, **options)
    trainer.remove_callback(CkptkitCallback)
    with pytest.warns(match="does not use FSDP2, so the training waits until checkpoint-. is written"):
        trainer.train()
    assert names_in_store(place) == {"checkpoint-3", "checkpoint-4"}
    assert all(part.is_ok and part.has_manifest for part in verify(f"{run}/checkpoint-3"))
    other = make_trainer(tmp_path / "other", **options)
    other.remove_callback(CkptkitCallback)
    with pytest.warns(match="does not use FSDP2"):
        other.train(resume_from_checkpoint=f"{run}/checkpoint-3")
    states = [dict(one.model.state_dict()) for one in (trainer, other)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    with pytest.raises(Unsupported, match="push_to_hub needs a local output_dir"):
        make_trainer(run, push_to_hub=True, **options)
