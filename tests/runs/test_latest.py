"""The latest checkpoint of a run is the one that its trainer resumes from, and the best one is never pruned."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptkit
from ckptkit.checkpoints.checkpoint import LatestDiffers

Lay = Callable[[Path], object]


def tracker(name: str, content: str) -> Lay:
    return lambda run: (run / name).write_text(content)


def link(name: str, target: str) -> Lay:
    return lambda run: (run / name).symlink_to(target)


def last(name: str, step: int | None) -> Lay:
    state = {"state_dict": {"w": torch.full((4,), 100.0)}, **({} if step is None else {"global_step": step})}
    return lambda run: torch.save(state, run / name)


def value_in(run: Path) -> float:
    (tensor,) = ckptkit.open(run).values()
    return float(tensor.torch()[0])


def lay(run: Path, *steps: int, name: str = "step-{}") -> Path:
    for step in steps:
        folder = run / name.format(step)
        folder.mkdir(parents=True)
        save_file({"w": torch.full((4,), float(step))}, folder / "model.safetensors")
    return run


SNAPSHOT = json.dumps({"latest_checkpoint_result": {"checkpoint_dir_name": "step-100"}})
NAMED = {
    "deepspeed": tracker("latest", "step-100"),
    "megatron": tracker("latest_checkpointed_iteration.txt", "100"),
    "skyrl": tracker("latest_ckpt_global_step.txt", "100"),
    "automodel": tracker("LATEST.txt", "step-100"),
    "ray": tracker("checkpoint_manager_snapshot.json", SNAPSHOT),
    "link": link("last", "step-100"),
    "link-to-file": link("latest-rank0.pt", "step-100/model.safetensors"),
}
NOT_NAMED = {
    "best": link("best", "step-100"),
    "lowest": tracker("LOWEST_VAL.txt", "step-100"),
    "same": tracker("latest", "step-300"),
    "nothing": tracker("latest", "\n"),
    "older-last": last("last.ckpt", 100),
}


@pytest.mark.parametrize("how", NAMED)
def test_the_checkpoint_that_the_trainer_resumes_from_is_taken_and_said(tmp_path: Path, how: str) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    NAMED[how](run)
    with pytest.warns(LatestDiffers, match="taking step-100, which `.*` names; the highest step is step-300"):
        assert value_in(run) == 100
    with pytest.warns(LatestDiffers):
        assert ckptkit.cp(run, tmp_path / "cp").source.name == "step-100"
    listing = ckptkit.ls(run)
    assert listing.latest is not None
    assert listing.latest.name == "step-100"


@pytest.mark.parametrize("how", NOT_NAMED)
def test_else_the_highest_step_is_taken(tmp_path: Path, how: str) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    NOT_NAMED[how](run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value_in(run) == 300


@pytest.mark.parametrize(
    ("lay_last", "value", "words"),
    [
        (last("last.ckpt", 400), 100, "taking last.ckpt, which `last.ckpt` names; the highest step is step-300"),
        (last("last-v1.ckpt", 400), 100, "taking last-v1.ckpt"),
        (last("checkpoint_last.pt", 400), 100, "taking checkpoint_last.pt"),
        (last("last.ckpt", None), 300, "`last.ckpt` does not say its step: it may be later; taking step-300"),
        (tracker("latest", "step-400"), 300, "`latest` names step-400, which does not exist; taking step-300"),
        (link("last", "step-400"), 300, "`last` names step-400, which does not exist"),
    ],
)
def test_what_may_be_later_is_taken_or_said(tmp_path: Path, lay_last: Lay, value: int, words: str) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    lay_last(run)
    with pytest.warns(LatestDiffers, match=words):
        assert value_in(run) == value


def test_an_unfinished_checkpoint_that_is_named_is_said(tmp_path: Path) -> None:
    run = lay(tmp_path / "run", 100, 200)
    (run / "step-300").mkdir()
    (run / "step-300" / "__0_0.distcp").write_bytes(b"")
    (run / "latest").write_text("step-300")
    with pytest.warns(LatestDiffers, match="`latest` names step-300, which is not complete; taking step-200"):
        assert value_in(run) == 200


def test_an_average_of_the_last_ends_at_the_one_that_is_named(tmp_path: Path) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    (run / "latest").write_text("step-200")
    with pytest.warns(LatestDiffers):
        ckptkit.average(run, tmp_path / "mean", last=2, names="keep")
    assert ckptkit.open(tmp_path / "mean")["w"].torch()[0] == 150


def by_state(run: Path) -> None:
    (run / "step-300" / "trainer_state.json").write_text(best_is("/elsewhere/run/step-100"))


def by_state_of_run(run: Path) -> None:
    (run / "trainer_state.json").write_text(best_is("step-100"))


def by_callback(run: Path) -> None:
    state = {"callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_path": "/elsewhere/step-100"}}}
    dcp.save({"w": torch.ones(4)}, checkpoint_id=str(run / "step-400"), no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.1", **state}, run / "step-400" / "meta.pt")


def best_is(path: str) -> str:
    return json.dumps({"global_step": 300, "log_history": [], "best_model_checkpoint": path})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name_best", [by_state, by_state_of_run, by_callback])
def test_the_best_one_is_never_pruned(tmp_path: Path, name_best: Lay) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    name_best(run)
    done = ckptkit.prune(run, keep_last=1, yes=True)
    assert (run / "step-100").is_dir()
    assert not (run / "step-200").exists()
    (kept,) = (entry for entry in done.keep if entry.path.name == "step-100")
    assert kept.reason.startswith("the best: ")
