"""The latest checkpoint of a run is the one that its trainer resumes from, and the best one is never pruned."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptkit
from ckptkit.checkpoints.checkpoint import LatestDiffers, RunAround

Lay = Callable[[Path], object]


def tracker(name: str, content: str) -> Lay:
    return lambda run: (run / name).write_text(content)


def link(name: str, target: str) -> Lay:
    return lambda run: (run / name).symlink_to(target)


def last(name: str, step: int | None) -> Lay:
    state = {"state_dict": {"w": torch.full((4,), 100.0)}, **({} if step is None else {"global_step": step})}
    return lambda run: torch.save(state, run / name)


def old_last(run: Path) -> None:
    last("last.ckpt", 100)(run)
    os.utime(run / "last.ckpt", (1, 1))


def value_in(run: Path) -> float:
    (tensor,) = ckptkit.open(run).values()
    return float(tensor.torch()[0])


def lay(run: Path, *steps: int, name: str = "step-{}") -> Path:
    for step in steps:
        folder = run / name.format(step)
        folder.mkdir(parents=True)
        save_file({"w": torch.full((4,), float(step))}, folder / "model.safetensors")
    return run


TENSORFLOW = 'model_checkpoint_path: "step-100"\nall_model_checkpoint_paths: "step-100"\n'
TENSORFLOW += 'all_model_checkpoint_paths: "step-300"\n'
SNAPSHOT = json.dumps({"latest_checkpoint_result": {"checkpoint_dir_name": "step-100"}})
NAMED = {
    "deepspeed": tracker("latest", "step-100"),
    "megatron": tracker("latest_checkpointed_iteration.txt", "100"),
    "skyrl": tracker("latest_ckpt_global_step.txt", "100"),
    "automodel": tracker("LATEST.txt", "step-100"),
    "ray": tracker("checkpoint_manager_snapshot.json", SNAPSHOT),
    "any-name": tracker("last_checkpoint", "step-100\n"),
    "any-path": tracker("latest_checkpoint.txt", "/elsewhere/run/step-100/model.safetensors"),
    "windows-path": tracker("latest", "D:\\runs\\mine\\step-100"),
    "any-step": tracker("latest_step.txt", "100"),
    "any-json": tracker("latest_checkpoint.json", json.dumps({"path": "runs/step-100", "best": "step-200"})),
    "any-step-in-json": tracker("last.json", json.dumps({"state": {"global_step": 100, "epoch": 200}})),
    "any-yaml": tracker("last_checkpoint.yaml", "path: ./step-100\nsave_steps: 200\n"),
    "tensorflow": tracker("checkpoint", TENSORFLOW),
    "utf-16": lambda run: (run / "latest").write_bytes("step-100\r\n".encode("utf-16")),
    "utf-16-be": lambda run: (run / "latest").write_bytes(b"\xfe\xff" + "step-100".encode("utf-16-be")),
    "utf-8-bom": lambda run: (run / "latest").write_bytes("step-100\n".encode("utf-8-sig")),
    "any-utf-16": lambda run: (run / "last_checkpoint").write_bytes("step-100\r\n".encode("utf-16")),
    "any-json-bom": lambda run: (run / "last.json").write_bytes('{"step": 100}'.encode("utf-8-sig")),
    "hidden": tracker(".latest", "step-100"),
    "nested-latest": tracker("last.json", json.dumps({"latest": {"step": 100}, "best": {"step": 300}})),
    "link": link("last", "step-100"),
    "link-to-file": link("latest-rank0.pt", "step-100/model.safetensors"),
}
NOT_NAMED = {
    "best": link("best", "step-100"),
    "lowest": tracker("LOWEST_VAL.txt", "step-100"),
    "same": tracker("latest", "step-300"),
    "older-last": old_last,
    "any-best": tracker("best_checkpoint.json", json.dumps({"path": "step-100"})),
    "nested-best": tracker("best.json", json.dumps({"best": {"step": 100, "loss": 0.1}, "last": {"step": 300}})),
    "nested-best-yaml": tracker("state.yaml", "best:\n  loss: 0.1\n  step: 100\nlast:\n  step: 300\n"),
    "nested-best-toml": tracker("state.toml", "[best]\nloss = 0.1\nstep = 100\n[last]\nstep = 300\n"),
    "best-csv": tracker("best.csv", "step,loss\n100,0.1\n"),
    "hidden-best": tracker(".best", "step-100"),
    "metrics of ckptkit": tracker("metrics.jsonl", '{"step": 99}\n{"step": 100, "checkpoint": "run/step-100"}\n'),
    "csv": tracker("log.csv", "step,loss\n100,0.1\n200,0.2\n300,0.1\n"),
    "any-same": tracker("latest_step.txt", "300"),
    "options": tracker("args.json", json.dumps({"save_steps": 100, "max_steps": 200, "seed": 100})),
    "log": tracker("log.txt", "saved step-100\nsaved step-200\n"),
    "longer": tracker("last_checkpoint", "step-1000 my-step-100 step-100b"),
    "bytes": lambda run: (run / "last_checkpoint").write_bytes(b"step-100\0\xff"),
}
GUESSED = {
    "resume": tracker("resume.json", json.dumps({"checkpoint": "step-100", "seed": 200})),
    "resume-step": tracker("resume.json", json.dumps({"resume_from_step": 100})),
    "resume-option": tracker("args.json", json.dumps({"resume_from_checkpoint": "/old/step-100", "save_steps": 200})),
    "notes": tracker("notes.txt", "The loss rose after step-100. Use step-100."),
}


def test_a_stray_file_in_a_run_is_not_taken_for_the_run(tmp_path: Path) -> None:
    run = lay(tmp_path / "run", 100, 200)
    torch.save({"w": torch.zeros(4)}, run / "final.pt")
    with pytest.warns(RunAround, match=r"using step-200, and not final\.pt beside it"):
        assert value_in(run) == 200


def test_why_a_lower_step_is_taken_is_said_beside_a_stray_file_too(tmp_path: Path) -> None:
    run = lay(tmp_path / "run", 100, 200)
    torch.save({"w": torch.zeros(4)}, run / "final.pt")
    (run / "last_checkpoint").write_text("step-100")
    with (
        pytest.warns(RunAround, match="using step-100"),
        pytest.warns(LatestDiffers, match="highest step is step-200"),
    ):
        assert value_in(run) == 100


def test_a_model_that_a_run_lies_in_is_taken_and_said(tmp_path: Path) -> None:
    run = lay(tmp_path / "run", 100, 200)
    save_file({"w": torch.full((4,), 7.0)}, run / "model.safetensors")
    with pytest.warns(RunAround, match="using the model in this directory, not step-200, the latest"):
        assert value_in(run) == 7


@pytest.mark.parametrize("how", NAMED)
def test_the_checkpoint_that_the_trainer_resumes_from_is_taken_and_said(tmp_path: Path, how: str) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    NAMED[how](run)
    with pytest.warns(LatestDiffers, match="using step-100, which `.*` names; the highest step is step-300"):
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


@pytest.mark.parametrize("steps", [(100, 200), (200, 100)])
def test_latest_checkpoint_files_that_disagree_are_both_said(tmp_path: Path, steps: tuple[int, int]) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    names = ("latest", "latest_checkpointed_iteration.txt")
    for name, step in zip(names, steps, strict=True):
        (run / name).write_text(f"step-{step}" if name == "latest" else str(step))
    lower = names[steps.index(100)]
    with (
        pytest.warns(LatestDiffers, match=f"`{lower}` names step-100"),
        pytest.warns(LatestDiffers, match="using step-200"),
    ):
        assert value_in(run) == 200


@pytest.mark.parametrize("content", ["", "\n", "/elsewhere/step-100\n\0"])
def test_a_tracker_that_names_nothing_is_said(tmp_path: Path, content: str) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    (run / "latest").write_text(content)
    with pytest.warns(LatestDiffers, match="`latest` names no checkpoint; using step-300"):
        assert value_in(run) == 300


@pytest.mark.parametrize("how", GUESSED)
def test_what_may_name_another_checkpoint_is_said(tmp_path: Path, how: str) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    GUESSED[how](run)
    with pytest.warns(LatestDiffers, match="names step-100; using step-300"):
        assert value_in(run) == 300


@pytest.mark.parametrize("name", ["any-name", "any-path", "windows-path", "any-step", "any-json", "tensorflow"])
@pytest.mark.parametrize("keep", [{"keep_last": 1}, {"keep_last": 1, "demote": True}])
def test_what_any_file_names_is_not_pruned(tmp_path: Path, name: str, keep: dict[str, Any]) -> None:
    run = lay(tmp_path / "run", 50, 100, 200, 300)
    NAMED[name](run)
    done = ckptkit.prune(run, yes=True, **keep)
    (kept,) = (entry for entry in done.keep if entry.path.name == "step-100")
    assert kept.reason.endswith("names it")
    assert (run / "step-50").exists() is ("demote" in keep)
    assert (run / "step-200").exists() is (name == "any-json" or "demote" in keep)


@pytest.mark.parametrize(
    "how", [*GUESSED, *("any-best", "nested-best", "nested-best-yaml", "nested-best-toml", "best-csv", "hidden-best")]
)
def test_what_is_guessed_is_not_pruned(tmp_path: Path, how: str) -> None:
    run = lay(tmp_path / "run", 50, 100, 200, 300)
    (GUESSED | NOT_NAMED)[how](run)
    ckptkit.prune(run, yes=True, keep_last=1)
    assert sorted(path.name for path in run.glob("step-*")) == ["step-100", "step-300"]


@pytest.mark.parametrize(
    ("lay_last", "value", "words"),
    [
        (last("last.ckpt", 400), 100, "using last.ckpt, which `last.ckpt` names; the highest step is step-300"),
        (last("last-v1.ckpt", 400), 100, "using last-v1.ckpt"),
        (last("last.ckpt", 100), 100, "using last.ckpt"),  # written after step 300: the training went back
        (last("checkpoint_last.pt", 400), 100, "using checkpoint_last.pt"),
        (last("last.ckpt", None), 300, "`last.ckpt` has no step in its name, so it may be later; using step-300"),
        (tracker("latest", "step-400"), 300, "`latest` names step-400, which does not exist; using step-300"),
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
    with pytest.warns(LatestDiffers, match="`latest` names step-300, which is not complete; using step-200"):
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


def by_state_of_windows(run: Path) -> None:
    (run / "step-300" / "trainer_state.json").write_text(best_is("C:\\runs\\mine\\step-100"))


def by_callback(run: Path) -> None:
    state = {"callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_path": "/elsewhere/step-100"}}}
    dcp.save({"w": torch.ones(4)}, checkpoint_id=str(run / "step-400"), no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.1", **state}, run / "step-400" / "meta.pt")


def best_is(path: str) -> str:
    return json.dumps({"global_step": 300, "log_history": [], "best_model_checkpoint": path})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name_best", [by_state, by_state_of_run, by_state_of_windows, by_callback])
def test_the_best_one_is_never_pruned(tmp_path: Path, name_best: Lay) -> None:
    run = lay(tmp_path / "run", 100, 200, 300)
    name_best(run)
    done = ckptkit.prune(run, keep_last=1, yes=True)
    assert (run / "step-100").is_dir()
    assert not (run / "step-200").exists()
    (kept,) = (entry for entry in done.keep if entry.path.name == "step-100")
    assert kept.reason.startswith("the best: ")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["{}.ckpt", "{}"])
@pytest.mark.parametrize("stem", ["epoch=0-step=5", "step=5", "epoch=5"])
def test_the_highest_version_of_a_name_is_the_newest(tmp_path: Path, stem: str, form: str) -> None:
    """Lightning adds a version if a checkpoint of the name exists."""
    for value, version in enumerate(["", "-v1", "-v2", "-v10"]):
        path = tmp_path / "run" / form.format(f"{stem}{version}")
        if path.suffix:
            path.parent.mkdir(exist_ok=True)
            torch.save({"state_dict": {"w": torch.full((4,), float(value))}}, path)
        else:
            dcp.save({"w": torch.full((4,), float(value))}, checkpoint_id=str(path), no_dist=True)
    assert value_in(tmp_path / "run") == 3
    assert ckptkit.ls(tmp_path / "run").latest == path
