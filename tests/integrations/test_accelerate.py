"""Saves of Accelerate's `save_state` in the background: its own files, complete or absent; it resumes from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptkit.checks.verify import verify
from ckptkit.errors import Unsupported, Usage
from ckptkit.io.path import to_path
from ckptkit.io.staging import Stage
from ckptkit.runs.pin import pin
from tests.producers import spawn
from tests.s3 import Place
from tests.trainers.produced_lightning import be_torchrun

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

BLOCKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.2)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = batch + self.drop(self.down(torch.relu(self.up(batch))))
        return out


class Counter:
    """An object for `register_for_checkpointing`, with a list that it changes."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Loop:
    """A plain Accelerate loop: a model with dropout, AdamW, a schedule, a loader and a registered object.

    The loader is shuffled on one rank. On several, Accelerate does not restore its order.
    """

    def __init__(
        self, accelerator_class: Any, *, fsdp: int = 0, state_dict: str = "SHARDED_STATE_DICT", **options: Any
    ) -> None:
        accelerate.utils.set_seed(0)
        self.accelerator = accelerator_class(cpu=True, **options)
        if fsdp:  # on CPUs, Accelerate does not turn FSDP on by itself
            for state in (accelerate.PartialState(), self.accelerator.state):
                state.distributed_type = accelerate.DistributedType.FSDP
                state.device = torch.device("cpu")  # FSDP1 refuses cpu:0
            self.accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=fsdp, state_dict_type=state_dict, auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"], cpu_ram_efficient_loading=False,
                use_orig_params=fsdp == 1 or None,
            )  # fmt: skip
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        rows = torch.utils.data.TensorDataset(torch.randn(64, 8))
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=not dist.is_initialized())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, steps: int) -> list[float]:
        """Train, and return the losses."""
        losses = []
        for _, (batch,) in zip(range(steps), self.loader, strict=False):
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.counter.seen.append(loss.item())
        return losses


def ours(**options: Any) -> Loop:
    from ckptkit.integrations.accelerate import BackgroundAccelerator

    return Loop(BackgroundAccelerator, **options)


def theirs(**options: Any) -> Loop:
    return Loop(accelerate.Accelerator, **options)


def fresh(make: Callable[..., Loop], **options: Any) -> Loop:
    """A loop of a new process: Accelerate keeps its state in its classes."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    return make(**options)


def names_in(root: Path) -> set[str]:
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".distcp")
    return {str(path.relative_to(root)) for path in files if path.name != "ckptkit.json"}


def save_both_ways(home: Path, fsdp: int) -> None:
    """Save with both, let each go on from the other's checkpoint, and compare the losses."""
    for make in (theirs, ours):
        loop = fresh(make, fsdp=fsdp)
        loop.train(3)
        loop.accelerator.save_state(home / make.__name__)
        losses = loop.train(3)  # while the state is written
        if make is ours:
            loop.accelerator.wait_for_save()
        loop.accelerator.wait_for_everyone()
    resumed = []
    for make, source in ((theirs, ours), (ours, theirs), (theirs, theirs)):
        loop = fresh(make, fsdp=fsdp)
        loop.accelerator.load_state(home / source.__name__)
        assert len(loop.counter.seen) == 3
        resumed.append(loop.train(3))
    assert resumed[0] == resumed[1] == resumed[2]
    if fsdp != 1:  # which Accelerate 1.15 itself does not resume exactly
        assert resumed[0] == losses


def _save_on_ranks(home: Path, fsdp: int) -> None:
    be_torchrun()
    save_both_ways(home, fsdp)


@pytest.mark.parametrize("fsdp", [2, 0, pytest.param(1, marks=pytest.mark.nightly)])
def test_checkpoints_of_ranks_are_those_of_accelerate(tmp_path: Path, fsdp: int) -> None:
    """Under FSDP2, FSDP1 and DDP."""
    spawn(2, _save_on_ranks, tmp_path, fsdp)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    assert all(part.is_ok and part.has_manifest for part in verify(tmp_path / "ours"))


def test_files_of_one_process_are_those_of_accelerate(tmp_path: Path) -> None:
    save_both_ways(tmp_path, 0)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    assert all(part.is_ok and part.has_manifest for part in verify(tmp_path / "ours"))


def _be_killed(home: Path) -> None:
    """Save once, and die when the second checkpoint is written and not yet visible."""
    be_torchrun()
    loop = ours(fsdp=2, keep_last=1)
    loop.train(2)
    loop.accelerator.save_state(home / "step_2")
    losses = loop.train(2)
    loop.accelerator.wait_for_save()
    torch.save(losses, home / f"losses-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        Stage.commit = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    loop.accelerator.save_state(home / "step_4")
    loop.accelerator.wait_for_save()


def _resume(home: Path) -> None:
    be_torchrun()
    loop = ours(fsdp=2, keep_last=1)
    loop.accelerator.load_state(home / "step_2")
    assert loop.train(2) == torch.load(home / f"losses-{dist.get_rank()}.pt")
    loop.accelerator.save_state(home / "step_4")
    loop.accelerator.wait_for_save()


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError):
        spawn(2, _be_killed, tmp_path)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_2"]
    spawn(2, _resume, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".pt"] == ["step_4"]  # by keep_last=1


def test_with_automatic_names_an_older_checkpoint_goes_when_the_new_one_is_there(tmp_path: Path) -> None:
    project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = fresh(ours, project_config=project)
    for _ in range(3):
        loop.train(2)
        loop.accelerator.save_state()
    losses = loop.train(2)
    loop.accelerator.wait_for_save()
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    Stage(root / "checkpoint_3").open()  # as a killed save leaves it
    os.unlink(root / ".checkpoint_3.ckptkit.lock")
    pin(root / "checkpoint_1")  # in a hidden directory, which Accelerate takes for a checkpoint
    project.iteration = 0
    other = fresh(ours, project_config=project)
    other.accelerator.load_state()
    assert other.train(2) == losses


def test_a_store_is_saved_to_and_loaded_from(place: Place) -> None:
    run = f"s3://{place.name}/run"
    loop = fresh(ours, keep_last=2)
    for step in (2, 4, 6, 6):  # the last replaces the one before
        loop.train(2)
        loop.accelerator.save_state(f"{run}/step_{step}")
    losses = loop.train(2)
    loop.accelerator.wait_for_save()
    assert {name.split("/")[2] for name in place.files.find(f"{place.name}/run", refresh=True)} == {"step_4", "step_6"}
    assert all(part.is_ok and part.has_manifest for part in verify(f"{run}/step_6"))
    other = fresh(ours)
    other.accelerator.load_state(f"{run}/step_6")
    assert len(other.counter.seen) == 8
    assert other.train(2) == losses


def test_a_checkpoint_is_replaced_and_a_directory_with_other_files_is_not(tmp_path: Path) -> None:
    loop = fresh(ours)
    for name in ("last", "last"):
        loop.train(1)
        loop.accelerator.save_state(tmp_path / name)
    loop.accelerator.wait_for_save()
    (tmp_path / "last" / "notes.txt").touch()
    loop.train(1)
    with pytest.warns(match="notes.txt.*, so the training waits until last is written"):
        loop.accelerator.save_state(tmp_path / "last")
    assert (tmp_path / "last" / "notes.txt").exists()
    assert all(part.is_ok for part in verify(tmp_path / "last"))
    with pytest.raises(Usage, match="keep_last: expected 1 or more, found 0"):
        fresh(ours, keep_last=0)


def test_the_checkpoint_just_saved_stays_after_a_rewind(tmp_path: Path) -> None:
    loop = fresh(ours, keep_last=1)
    for step in (6, 2, 4):
        loop.train(1)
        loop.accelerator.save_state(tmp_path / f"step_{step}")
    loop.accelerator.wait_for_save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_6"]


def test_a_relative_path_means_the_directory_at_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, commit = threading.Event(), Stage.commit

    def commit_later(stage: Stage) -> None:
        assert changed.wait(60)
        commit(stage)

    monkeypatch.setattr(Stage, "commit", commit_later)
    monkeypatch.chdir(tmp_path)
    loop = fresh(ours, keep_last=1)
    for step in (1, 2):
        changed.clear()
        loop.accelerator.save_state(f"run/step_{step}")
        monkeypatch.chdir("/")
        changed.set()
        loop.accelerator.wait_for_save()
        monkeypatch.chdir(tmp_path)
    assert os.listdir("run") == ["step_2"]


def test_a_name_without_a_step_is_not_counted_with_a_warning(tmp_path: Path) -> None:
    loop = fresh(ours, keep_last=1)
    for epoch in range(2):
        loop.accelerator.save_state(tmp_path / f"epoch_{epoch}")
        with pytest.warns(match=f"epoch_{epoch}: `keep_last` does not count this checkpoint: its name does not end"):
            loop.accelerator.wait_for_save()
    assert len(os.listdir(tmp_path)) == 2


def test_an_error_of_the_last_save_is_logged_at_the_exit(tmp_path: Path) -> None:
    code = (
        "from ckptkit.integrations.accelerate import BackgroundAccelerator as Accelerator\n"
        "from ckptkit.io.staging import Stage\n"
        "Stage.commit = lambda _: 1 / 0\n"
        "Accelerator(cpu=True).save_state('last')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stderr.endswith("the last checkpoint was not saved: division by zero\n")
    assert not os.listdir(tmp_path)


def test_accelerate_itself_saves_and_older_checkpoints_go_but_not_to_a_store(tmp_path: Path) -> None:
    project = accelerate.utils.ProjectConfiguration(save_on_each_node=True)
    loop = fresh(ours, keep_last=1, project_config=project)
    for step in (2, 4):
        loop.train(1)
        with pytest.warns(match="save_on_each_node is set, so the training waits"):
            loop.accelerator.save_state(tmp_path / f"step_{step}")
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]
    with pytest.raises(Unsupported, match="save_on_each_node is set, so Accelerate itself saves") as raised:
        loop.accelerator.save_state("s3://bucket/run/step_6")
    assert raised.value.path == to_path("s3://bucket/run/step_6")


def test_a_checkpoint_without_a_model_is_saved_without_a_manifest(tmp_path: Path) -> None:
    from ckptkit.integrations.accelerate import BackgroundAccelerator

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = BackgroundAccelerator(cpu=True)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path / "step_1")
    with pytest.warns(match="step_1: saved without a manifest: "):
        accelerator.wait_for_save()
    counter.seen = [1.0]
    accelerator.load_state(tmp_path / "step_1")
    assert counter.seen == []


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, commit = threading.Event(), Stage.commit

    def commit_after_training(stage: Stage) -> None:
        assert trained.wait(60)
        commit(stage)

    monkeypatch.setattr(Stage, "commit", commit_after_training)
    loop = fresh(ours)
    loop.train(1)
    loop.accelerator.save_state(tmp_path / "step_1")
    losses = loop.train(3)
    assert not (tmp_path / "step_1").exists()
    trained.set()
    loop.accelerator.end_training()
    other = fresh(theirs)
    other.accelerator.load_state(tmp_path / "step_1")
    assert other.train(3) == losses


def _save_full(home: Path) -> None:
    be_torchrun()
    loop = ours(fsdp=2, state_dict="FULL_STATE_DICT")
    loop.train(1)
    with pytest.warns(match="FULL_STATE_DICT, not SHARDED_STATE_DICT, so the training waits until step_1 is written"):
        loop.accelerator.save_state(home / "step_1")
    assert (home / "step_1" / "pytorch_model_fsdp.bin").is_file()


def test_a_full_state_dict_is_saved_by_accelerate_itself(tmp_path: Path) -> None:
    spawn(2, _save_full, tmp_path)
