"""What `ls` sees in runs of many trainers, on real checkpoints under the names and with the files that they have."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import NotACheckpoint
from ckptkit.runs.deletion import set_pin
from ckptkit.runs.ls import Listed, Listing, list_run
from ckptkit.runs.retention import dump_metrics
from ckptkit.trainers.ckptkit import METRICS
from tests import producers
from tests.conftest import Produce

Place = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def place(produce: Produce, run: Path) -> Place:
    """Put the checkpoint of a producer into the run."""

    def put(name: str, producer: producers.Producer = producers.under_model) -> Path:
        shutil.copytree(produce(producer).root, run / name)
        return run / name

    return put


def names(found: Listing) -> list[str]:
    return [one.path.name for one in found.checkpoints]


def by_name(run: Path) -> dict[str, Listed]:
    return {one.path.name: one for one in list_run(run).checkpoints}


def test_all_that_can_be_told_of_one(run: Path, place: Place) -> None:
    root = place("ckpt-7", producers.fsdp2)
    (root / METRICS).write_bytes(dump_metrics(7, {"loss": 0.5, "lr": 1e-3}))
    for file in root.iterdir():
        os.utime(file, (1e9, 1e9))
    os.utime(root / METRICS, (1e9 + 5, 1e9 + 5))
    (root / "ckptkit.json").write_text("made later\n")
    found = list_run(str(run))
    assert found == Listing(
        run,
        (
            Listed(
                path=root,
                step=7,
                format="dcp",
                is_complete=True,
                world_size=3,
                nbytes=sum(file.stat().st_size for file in root.iterdir()),
                saved_at=1e9 + 5,
                metrics={"loss": 0.5, "lr": 1e-3},
                is_pinned=False,
                problem=None,
            ),
        ),
        root,
        None,
    )


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("ckpt-5", 5), ("checkpoint-5", 5), ("checkpoint_5", 5), ("step-5", 5), ("step5", 5), ("step_5_ckp", 5)),
        *(("global_step5", 5), ("global_step_5", 5), ("iter_0000005", 5), ("0000000005", 5), ("epoch_3", 3)),
        *(("ep1-ba5", 5), ("epoch=1-step=5.ckpt", 5), ("epoch_1_step_5", 5)),
        ("model--val_loss=2.50-step=5-consumed_samples=40.0", 5),
    ],
)
def test_directory_names_of_trainers(run: Path, place: Place, name: str, step: int) -> None:
    place("ckpt-1")
    place(name)
    (one,) = [one for one in list_run(run).checkpoints if one.path.name != "ckpt-1"]
    assert (one.path.name, one.step, one.is_complete) == (name, step, True)


def test_files_of_trainers(run: Path) -> None:
    for name in ("epoch=0-step=5.ckpt", "ep1-ba6-rank0.pt", "step_7.pt", "tokens-8.pt"):
        torch.save({"state_dict": {"w": torch.ones(3)}}, run / name)
    (run / "step_9.txt").write_text("no checkpoint")
    found = list_run(run)
    assert [(one.step, one.format, one.is_complete) for one in found.checkpoints] == [
        (step, "pt", True) for step in (5, 6, 7)
    ]
    assert found.latest == run / "step_7.pt"


def test_oldest_first_and_what_has_no_step_last(run: Path, place: Place) -> None:
    for name in ("final", "ckpt-10", "ckpt-9", "ckpt-100"):
        place(name)
    (run / "logs").mkdir()
    (run / "ckpt-200").symlink_to("ckpt-9")
    found = list_run(run)
    assert names(found) == ["ckpt-9", "ckpt-10", "ckpt-100", "final"]
    assert found.latest == run / "ckpt-100"


def test_what_is_not_complete_says_why(run: Path, place: Place) -> None:
    place("ckpt-1")
    (place("ckpt-2") / ".metadata").unlink()
    (run / "ckpt-3").mkdir()
    (run / "ckpt-4").mkdir()
    (run / "ckpt-4" / "notes.txt").touch()
    (place("checkpoint-5", producers.accelerate) / "optimizer_0" / ".metadata").unlink()
    (place("ckpt-6") / METRICS).write_bytes(b"{")
    found = list_run(run)
    assert [(one.is_complete, one.problem) for one in found.checkpoints] == [
        (True, None),
        (False, "unfinished"),
        (False, "empty"),
        (False, "no known format"),
        (False, "optimizer_0 unfinished"),
        (True, "unreadable metrics"),
    ]
    assert found.latest == run / "ckpt-6"


def test_ranks_by_the_names_of_their_files(run: Path, place: Place) -> None:
    place("ckpt-1", producers.fsdp2)
    place("checkpoint-2", producers.accelerate)
    place("ckpt-3", producers.full)
    verl = run / "global_step_4" / "actor"
    verl.mkdir(parents=True)
    for rank in range(3):
        (verl / f"model_world_size_3_rank_{rank}.pt").write_bytes(b"pickle")
    assert [one.world_size for one in list_run(run).checkpoints] == [3, 2, None, 3]


def test_a_model_without_a_training(run: Path) -> None:
    for step, files in ((1, ("config.json",)), (2, ("optimizer.pt",))):
        (run / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.ones(3)}, run / f"checkpoint-{step}" / "model.safetensors")
        for name in files:
            (run / f"checkpoint-{step}" / name).write_text("{}")
    assert [one.is_weights_only for one in list_run(run).checkpoints] == [True, False]


def trainer_state(step: int, log: list[dict[str, Any]]) -> str:
    return json.dumps({"global_step": step, "log_history": log})


def test_what_the_trainer_of_transformers_logged(run: Path, place: Place) -> None:
    log: list[dict[str, Any]] = [
        {"step": 4, "loss": 9.0},
        {"step": 8, "loss": 2.5, "learning_rate": 1e-4, "epoch": 0.1},
        {"step": 8, "eval_loss": 2.0, "eval_runtime": 3.0, "eval_samples_per_second": 1.0},
    ]
    (place("checkpoint-8") / "trainer_state.json").write_text(trainer_state(8, log))
    (place("checkpoint-12") / "trainer_state.json").write_text(trainer_state(12, log))
    found = by_name(run)
    assert found["checkpoint-8"].metrics == {"loss": 2.5, "eval_loss": 2.0}
    assert found["checkpoint-12"].metrics == {}


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"global_step": 8, "log_history": [1]}', '{"log_history": [{}]}'])
def test_a_trainers_state_that_is_none(run: Path, place: Place, text: str) -> None:
    (place("checkpoint-8") / "trainer_state.json").write_text(text)
    (one,) = list_run(run).checkpoints
    assert (one.is_complete, one.metrics, one.problem) == (True, {}, "unreadable metrics")


def test_pins_and_trackers_are_told(run: Path, place: Place) -> None:
    for step in (5, 10):
        place(f"iter_{step:07}")
    (place("iter_0000015") / ".metadata").unlink()
    set_pin(run / "iter_0000005")
    (run / "latest_checkpointed_iteration.txt").write_text("15\n")
    (run / "best").symlink_to("iter_0000010")
    found = list_run(run)
    assert [(one.is_pinned, one.named_by) for one in found.checkpoints] == [
        (True, ()),
        (False, ("best",)),
        (False, ("latest_checkpointed_iteration.txt",)),
    ]
    assert found.latest == run / "iter_0000010"
    assert found.tracker == (
        "`best` says iter_0000010; `latest_checkpointed_iteration.txt` says iter_0000015, which is not complete"
    )
    (run / "latest_checkpointed_iteration.txt").write_text("16\n")
    assert "says 16, which does not exist" in str(list_run(run).tracker)


def test_one_checkpoint_is_listed_alone(run: Path, place: Place) -> None:
    place("checkpoint-1", producers.accelerate)
    place("checkpoint-2", producers.accelerate)
    set_pin(run / "checkpoint-1")
    found = list_run(run / "checkpoint-1")
    assert (found.root, names(found), found.latest) == (run, ["checkpoint-1"], None)
    assert found.checkpoints[0].is_pinned
    torch.save({"w": torch.ones(3)}, run / "model.pt")
    assert names(list_run(run / "model.pt")) == ["model.pt"]


def test_the_directory_above_a_run(produce: Produce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the quickstart leaves it: a run, an exported model, and a file of torch.save."""
    shutil.copytree(produce(producers.fsdp2).root, tmp_path / "run" / "ckpt-5")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotACheckpoint) as refused:
        list_run(".")
    assert refused.value.hint == "pass `run`, which contains checkpoints"
    shutil.copytree(produce(producers.hf_alone).root, tmp_path / "out")
    found = list_run(".")
    assert (names(found), found.runs) == (["out"], (Path("run"),))
    torch.save({"w": torch.ones(3)}, "state.pt")
    found = list_run(".")
    assert ([one.name for one in found.checkpoints], found.runs) == ([tmp_path.name], (Path("run"),))
    sizes = [file.stat().st_size for place in (Path(), Path("out")) for file in place.iterdir() if file.is_file()]
    assert found.checkpoints[0].nbytes == sum(sizes)


def test_outputs_beside_each_other_are_listed_each(produce: Produce, tmp_path: Path) -> None:
    source, exports = produce(producers.fsdp2).root, tmp_path / "exports"
    ckptkit.consolidate(source, exports / "model", names="keep")
    ckptkit.convert(source, exports / "shards", to="dcp", world_size=2)
    ckptkit.convert(source, exports / "state.pt", to="pt")
    assert names(list_run(exports)) == ["model", "shards", "state.pt"]
    ckptkit.consolidate(source, tmp_path / "one", names="keep")
    assert names(list_run(tmp_path / "one")) == ["one"]


def test_a_file_that_is_one_of_several_is_not_complete(run: Path) -> None:
    for number in (1, 2):
        file = run / f"model-0000{number}-of-00002.safetensors"
        save_file({f"layers.{number}.weight": torch.ones(2, 2)}, file)
    (listed,) = list_run(run / "model-00001-of-00002.safetensors").checkpoints
    assert not listed.is_complete
    assert "this is one of 2" in str(listed.problem)


@pytest.mark.parametrize("name", ["train.toml", "metrics.jsonl", "trainer_state.json", "latest"])
def test_a_run_without_a_checkpoint_is_called_that(run: Path, name: str) -> None:
    (run / name).write_text("{}")
    with pytest.raises(NotACheckpoint, match=f"the run has no checkpoint yet, only {name}"):
        list_run(run)


def test_nothing_to_list(run: Path) -> None:
    (run / "notes.txt").write_text("no checkpoint")
    for path in (run, run / "absent", run / "notes.txt"):
        with pytest.raises(NotACheckpoint):
            list_run(path)
    (run / "ckpt-1").mkdir()
    assert names(list_run(run)) == ["ckpt-1"]


def test_no_tensor_and_no_metadata_is_read(run: Path, place: Place) -> None:
    """They may as well be pipes, on which whoever opened them would wait for ever."""
    root = place("ckpt-1")
    for file in root.iterdir():
        file.unlink()
        os.mkfifo(file)
    (one,) = list_run(run).checkpoints
    assert (one.is_complete, one.world_size) == (True, 1)
