"""Who can be pinned, and that nothing that is pinned is deleted, whoever deletes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit import pin, prune, unpin
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Corrupt, NotACheckpoint, Usage
from ckptkit.runs.deletion import PINS, locked_for_deletion, pinned_names_in
from ckptkit.training.saving.run import Run
from tests import producers
from tests.conftest import Produce


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        shutil.copytree(produce(producers.under_model).root, tmp_path / "run" / f"ckpt-{step}")
    return tmp_path / "run"


def test_neither_prune_nor_a_training_deletes_what_is_pinned(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    model = nn.Linear(2, 2)
    run.save(1, model)
    assert pin(tmp_path / "ckpt-1") == pin(tmp_path / "ckpt-1") == [tmp_path / "ckpt-1"]
    run.save(2, model)
    run.save(3, model)
    assert [found.step for found in run.checkpoints()] == [1, 3]
    done = prune(tmp_path, keep_last=1, yes=True)
    assert [(entry.step, entry.reason) for entry in done.keep] == [(3, "one of the last 1"), (1, "pinned")]
    assert unpin(tmp_path / "ckpt-1", tmp_path / "ckpt-1") == [tmp_path / "ckpt-1"]
    assert unpin(tmp_path / "ckpt-1") == []
    run.save(4, model)
    assert [found.step for found in run.checkpoints()] == [4]


def test_a_run_means_its_latest_and_a_link_what_it_leads_to(run: Path) -> None:
    assert pin(run) == [run / "ckpt-3"]
    (run / "best").symlink_to("ckpt-1")
    assert pin(run / "best", run / "ckpt-1") == [run / "ckpt-1"]
    assert pinned_names_in(run) == {"ckpt-1", "ckpt-3"}


def test_what_is_no_complete_checkpoint_cannot_be_pinned(produce: Produce, run: Path) -> None:
    (run / "ckpt-2" / ".metadata").unlink()
    (run / "logs").mkdir()
    shutil.copytree(produce(producers.accelerate).root, run / "checkpoint-5")
    for path in (run / "ckpt-2", run / "logs", run / "absent"):
        with pytest.raises(NotACheckpoint):
            pin(run / "ckpt-1", path)
        with pytest.raises(NotACheckpoint):
            unpin(path)
    with pytest.raises(Usage, match="a part of a checkpoint") as raised:
        pin(run / "checkpoint-5" / "optimizer_0")
    assert str(run / "checkpoint-5") in str(raised.value.hint)
    assert not (run / PINS).exists()


@pytest.mark.parametrize("models", [["a"], ["a", "b"]])
def test_a_directory_of_models_is_not_pinned(produce: Produce, tmp_path: Path, models: list[str]) -> None:
    for name in models:
        shutil.copytree(produce(producers.hf_alone).root, tmp_path / "exports" / name)
    with pytest.raises(Usage, match=rf"found a directory of {len(models)} models?: {', '.join(models)}") as refused:
        pin(tmp_path / "exports")
    assert refused.value.hint == f"pin one of them: {tmp_path / 'exports' / 'a'}"
    assert not (tmp_path / PINS).exists()
    assert pin(tmp_path / "exports" / "a") == [tmp_path / "exports" / "a"]


@pytest.mark.parametrize("names", [["one.pt"], ["a.pt", "b.pt"], ["step=1.ckpt", "step=2.ckpt"]])
def test_a_file_is_not_pinned(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    for path in (tmp_path / names[-1], *([tmp_path] if len(names) > 1 else [])):
        with pytest.raises(Usage, match=r"expected a directory, found the file .*, which `prune` never deletes"):
            pin(path)
    assert not (tmp_path / PINS).exists()


@pytest.mark.parametrize("size", [None, 100], ids=["missing", "short"])
def test_a_checkpoint_without_its_shards_cannot_be_pinned(run: Path, size: int | None) -> None:
    shard = next((run / "ckpt-2").glob("*.distcp"))
    shard.unlink() if size is None else os.truncate(shard, size)
    with pytest.raises(Corrupt) as refused:
        pin(run / "ckpt-1", run / "ckpt-2")
    assert refused.value.path is not None
    assert run / "ckpt-2" in (refused.value.path, refused.value.path.parent)
    assert not (run / PINS).exists()


def test_shards_on_another_disk_are_there(run: Path) -> None:
    for shard in (run / "ckpt-2").glob("*.distcp"):
        (run.parent / "disk" / "ckpt-2").mkdir(parents=True, exist_ok=True)
        shard.rename(run.parent / "disk" / "ckpt-2" / shard.name)
    with pytest.raises(Corrupt, match="1 of 1 files are missing"):
        pin(run / "ckpt-2")
    assert pin(Checkpoint.open(run / "ckpt-2", also=[run.parent / "disk" / "ckpt-2"])) == [run / "ckpt-2"]


def test_a_pin_outlives_its_checkpoint_and_can_be_taken_back(run: Path) -> None:
    pin(run / "ckpt-1")
    shutil.rmtree(run / "ckpt-1")
    assert unpin(run / "ckpt-1") == [run / "ckpt-1"]
    assert pinned_names_in(run) == frozenset()


def test_a_pin_waits_for_whoever_deletes_just_now(run: Path) -> None:
    with locked_for_deletion(run):
        pinning = threading.Thread(target=pin, args=(run / "ckpt-1",))
        pinning.start()
        pinning.join(0.3)
        assert pinned_names_in(run) == frozenset()
    pinning.join()
    assert pinned_names_in(run) == {"ckpt-1"}
