"""Lightning's Trainer saves in the background: its own files, complete or absent; it resumes from them."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import ckptkit
from ckptkit.checks.verify import verify
from ckptkit.errors import CkptError, Unsupported
from ckptkit.integrations.background import delete_in_store
from ckptkit.io.path import to_path
from ckptkit.io.staging import Stage
from ckptkit.runs.deletion import locked_for_deletion
from ckptkit.runs.pin import pin
from tests.producers import spawn
from tests.s3 import Place
from tests.trainers.produced_lightning import batches, be_torchrun, make_module

pytest.importorskip("lightning")

pytestmark = pytest.mark.slow

FSDP1 = "BackgroundFSDPStrategy"
FSDP2 = "BackgroundModelParallelStrategy"


def make_trainer(
    home: str | Path, strategy: str, steps: int, callbacks: Sequence[Any] = (), **options: Any
) -> tuple[Any, Any]:
    """A Trainer of Lightning that saves after each second step, and its module. Without a strategy, of one process."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    from ckptkit.integrations import lightning as ours

    plugins: list[Any] = []
    chosen: Any = "auto"
    if strategy in ("", "DDPStrategy"):
        # as it arrives in a process of ddp_spawn
        plugins = [pickle.loads(pickle.dumps(ours.CkptkitIO(background=True)))]
    if strategy == "DDPStrategy":
        chosen = DDPStrategy(process_group_backend="gloo")
    elif strategy in ("", "theirs"):
        pass
    elif strategy.endswith("FSDPStrategy"):
        # Lightning refuses its own class on CPUs, but no subclass
        kind = type("Plain", (FSDPStrategy,), {}) if strategy == "FSDPStrategy" else getattr(ours, strategy)
        chosen = kind(state_dict_type="sharded", process_group_backend="gloo", auto_wrap_policy={nn.Linear})
    else:
        kind = ModelParallelStrategy if strategy == "ModelParallelStrategy" else getattr(ours, strategy)
        chosen = kind(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    is_sharded = "Strategy" in strategy
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2 if is_sharded else 1, strategy=chosen, plugins=plugins, max_steps=steps,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=home, every_n_train_steps=2, **options), *callbacks],
    )  # fmt: skip
    module = make_module(is_sharded="ModelParallel" in strategy)
    if strategy.endswith("FSDPStrategy"):  # which would choose a GPU
        module.configure_model = partial(wrap_on_cpu, module)
    return trainer, module


def wrap_on_cpu(module: Any) -> None:
    if not isinstance(module.net, FullyShardedDataParallel):
        module.net = FullyShardedDataParallel(module.net, device_id=torch.device("cpu"), use_orig_params=True)


def fit(
    home: str | Path, strategy: str, steps: int, resume: str | Path | None = None, **options: Any
) -> dict[str, Any]:
    """Train and return the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, module = make_trainer(home, strategy, steps, **options)
        trainer.fit(module, batches(), ckpt_path=resume)
    assert trainer.global_step == steps
    state = module.state_dict()
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _fit_both_ways(home: Path, strategy: str) -> None:
    be_torchrun()
    theirs = strategy.removeprefix("Background")
    weights = fit(home / "theirs", theirs, 4, save_top_k=-1)
    assert same(fit(home / "ours", strategy, 4, save_top_k=-1), weights)
    # within an epoch Lightning begins its data again, so its own resume is the truth
    resumed = fit(home / "resumed", theirs, 4, home / "theirs" / "epoch=0-step=2.ckpt")
    assert same(fit(home / "from-ours", theirs, 4, home / "ours" / "epoch=0-step=2.ckpt"), resumed)
    assert same(fit(home / "from-theirs", strategy, 4, home / "theirs" / "epoch=0-step=2.ckpt"), resumed)


@pytest.mark.parametrize("strategy", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.nightly)])
def test_sharded_checkpoints_are_those_of_lightning(tmp_path: Path, strategy: str) -> None:
    spawn(2, _fit_both_ways, tmp_path, strategy)
    for step in (2, 4):
        roots = [tmp_path / name / f"epoch=0-step={step}.ckpt" for name in ("theirs", "ours")]
        theirs, ours = ({path.name for path in root.iterdir() if path.suffix != ".distcp"} for root in roots)
        assert ours - theirs == {"ckptkit.json"}
        assert theirs - ours == set()
        assert all(part.is_ok and part.has_manifest and not part.unchecked_bytes for part in verify(roots[1]))


def _fit_and_resume(home: Path) -> None:
    be_torchrun()
    fit(home, "DDPStrategy", 2)
    fit(home, "DDPStrategy", 6, home / "epoch=0-step=2.ckpt", monitor="step", mode="max")


def test_rank_0_of_ddp_saves_in_the_background(tmp_path: Path) -> None:
    spawn(2, _fit_and_resume, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=2.ckpt", "epoch=1-step=6.ckpt"]
    assert all(part.is_ok and part.has_manifest for part in verify(tmp_path / "epoch=1-step=6.ckpt"))


def _be_killed(home: Path) -> None:
    """Save once, and die when the second checkpoint is written and not yet visible."""
    be_torchrun()
    commit = Stage.commit

    def die_at_second(stage: Stage) -> None:
        if "step=4" in stage.dst.name:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(stage)

    Stage.commit = die_at_second  # type: ignore[method-assign,assignment]
    fit(home, FSDP2, 6)


def _resume(home: Path) -> None:
    be_torchrun()
    # resumes at step 2; Lightning keeps that checkpoint, and the best
    fit(home, FSDP2, 8, home / "epoch=0-step=2.ckpt", monitor="step", mode="max")


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    home = tmp_path / "run"
    with pytest.raises(ChildProcessError):
        spawn(2, _be_killed, home)
    assert [path.name for path in home.glob("*.ckpt")] == ["epoch=0-step=2.ckpt"]
    spawn(2, _resume, home)
    assert sorted(path.name for path in home.iterdir()) == ["epoch=0-step=2.ckpt", "epoch=1-step=8.ckpt"]


def test_one_process_saves_in_the_background_and_resumes(tmp_path: Path) -> None:
    weights = fit(tmp_path / "theirs", "theirs", 4, save_top_k=-1)
    assert same(fit(tmp_path / "ours", "", 4, save_top_k=-1, save_last=True), weights)
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    assert all(part.is_ok and not part.unchecked_bytes for part in verify(tmp_path / "ours" / "last.ckpt"))
    resumed = fit(tmp_path / "resumed", "theirs", 4, tmp_path / "theirs" / "epoch=0-step=2.ckpt")
    assert same(fit(tmp_path / "from-ours", "", 4, tmp_path / "ours" / "epoch=0-step=2.ckpt"), resumed)


def test_an_older_checkpoint_goes_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    commit = Stage.commit

    def commit_and_list(stage: Stage) -> None:
        listed.append(sorted(path.name for path in tmp_path.glob("*.ckpt")))
        if "step=6" in stage.dst.name:
            raise CkptError("no more room")
        commit(stage)

    monkeypatch.setattr(Stage, "commit", commit_and_list)
    with pytest.raises(CkptError, match="no more room"):
        fit(tmp_path, "", 6, save_top_k=1)
    assert listed == [[], ["epoch=0-step=2.ckpt"], ["epoch=0-step=4.ckpt"]]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=4.ckpt"]


def test_a_pinned_checkpoint_stays(tmp_path: Path) -> None:
    fit(tmp_path, "", 2)
    pin(tmp_path / "epoch=0-step=2.ckpt")
    fit(tmp_path, "", 6, tmp_path / "epoch=0-step=2.ckpt", save_top_k=1)
    kept = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert kept == ["epoch=0-step=2.ckpt", "epoch=0-step=6.ckpt"]


def test_a_failed_deletion_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.integrations import lightning as ours

    monkeypatch.setattr(ours, "_PATIENCE", 0.0)
    (tmp_path / "epoch=0-step=2.ckpt").mkdir()
    with (
        locked_for_deletion(tmp_path),
        pytest.warns(match="an old checkpoint was not deleted: .*another process is deleting"),
    ):
        ours.CkptkitIO().remove_checkpoint(tmp_path / "epoch=0-step=2.ckpt")


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning

    trained, commit = threading.Event(), Stage.commit

    class AfterThirdStep(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                assert not (tmp_path / "epoch=0-step=2.ckpt").exists()
                trained.set()

    def commit_after_training(stage: Stage) -> None:
        assert trained.wait(60)
        commit(stage)

    monkeypatch.setattr(Stage, "commit", commit_after_training)
    fit(tmp_path, "", 3, callbacks=[AfterThirdStep()])
    assert all(part.is_ok for part in verify(tmp_path / "epoch=0-step=2.ckpt"))


def test_a_save_after_training_is_written_when_it_returns(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, module = make_trainer(tmp_path, "", 1)
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert all(part.is_ok and part.has_manifest for part in verify(tmp_path / "end.ckpt"))


def _fit_full(home: Path) -> None:
    be_torchrun()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, module = make_trainer(home, FSDP2, 6)  # rank 0 deletes older checkpoints
        trainer.strategy._save_distributed_checkpoint = False
        trainer.fit(module, batches())


def test_a_full_model_of_a_strategy_is_the_file_of_lightning(tmp_path: Path) -> None:
    spawn(2, _fit_full, tmp_path, timeout=45)
    (file,) = tmp_path.iterdir()
    assert file.is_file()
    assert torch.load(file, weights_only=True)["state_dict"].keys() == {
        "net.up.weight",
        "net.up.bias",
        "net.down.weight",
    }


def names_in_store(place: Place) -> set[str]:
    return {name.split("/")[2] for name in place.files.find(f"{place.name}/run", refresh=True)}


def _fit_in_store(home: Path, run: str, env: dict[str, str]) -> None:
    be_torchrun()
    os.environ.update(env)
    fit(f"{run}/", FSDP2, 4, save_top_k=1)
    fit(home / "theirs", "ModelParallelStrategy", 4)
    resumed = fit(home / "resumed", "ModelParallelStrategy", 6, home / "theirs" / "epoch=0-step=4.ckpt")
    assert same(fit(home / "ours", FSDP2, 6, run), resumed)
    assert same(fit(home / "named", FSDP2, 6, f"{run}/epoch=0-step=4.ckpt"), resumed)
    trainer, module = make_trainer(run, FSDP2, 2)
    trainer.strategy._save_distributed_checkpoint = False
    with pytest.raises(Unsupported, match="Lightning itself saves a full model, and only locally"):
        trainer.fit(module, batches())


def test_shards_are_saved_to_a_store_and_resumed_from_it(place: Place, tmp_path: Path) -> None:
    run = f"s3://{place.name}/run"
    spawn(2, _fit_in_store, tmp_path, run, place.server.env)
    assert names_in_store(place) == {"epoch=0-step=4.ckpt"}
    assert all(part.is_ok and part.has_manifest for part in verify(f"{run}/epoch=0-step=4.ckpt"))


def test_one_process_saves_to_a_store_and_resumes_from_it(place: Place, tmp_path: Path) -> None:
    run = f"s3://{place.name}/run"
    best = {"monitor": "step", "mode": "max"}
    weights = []
    for home in (tmp_path, run):
        fit(home, "", 2)
        pin(f"{home}/epoch=0-step=2.ckpt")
        fit(home, "", 4, f"{home}/epoch=0-step=2.ckpt", **best)
        resume = run if home == run else f"{home}/epoch=0-step=4.ckpt"
        weights.append(fit(home, "", 8, resume, save_last=True, **best))
    assert same(*weights)
    # without step=4, which last.ckpt of step 6 recorded as the best
    assert names_in_store(place) == {".pins", "epoch=0-step=2.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"}
    assert all(part.is_ok and part.has_manifest for part in verify(f"{run}/last.ckpt"))


def test_checkpoints_in_directories_below_the_run_are_deleted_in_a_store(place: Place) -> None:
    """A metric such as `val/loss` in `filename` makes such directories."""
    fit(f"s3://{place.name}/run", "", 4, filename="val/{step}", save_top_k=1)
    names = place.files.find(f"{place.name}/run", refresh=True)
    assert {tuple(name.split("/")[2:4]) for name in names} == {("val", "step=4.ckpt")}


def test_the_base_of_a_delta_in_a_store_is_not_deleted(place: Place, tmp_path: Path) -> None:
    run = to_path(f"s3://{place.name}/run")
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"w": torch.full((4,), float(step))}, folder / "model.safetensors")
        ckptkit.cp(folder, f"{run}/{folder.name}")
    ckptkit.delta(f"{run}/checkpoint-1", f"{run}/checkpoint-2", f"{run}/delta-2", force=True)
    delete_in_store(run, lambda: [run / "checkpoint-1", run / "checkpoint-2"])
    assert names_in_store(place) == {"checkpoint-1", "delta-2"}
