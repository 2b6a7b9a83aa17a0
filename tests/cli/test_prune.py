"""`ckptkit prune` on the command line: what it shows, its JSON and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckptkit.runs.deletion import locked_for_deletion
from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce
from tests.producers import save_alone


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    for step in (1, 2, 10):
        shutil.copytree(produce(producers.under_model).root, tmp_path / "run" / f"ckpt-{step}")
    (tmp_path / "run" / "\x1b[31mred").mkdir()
    return tmp_path / "run"


def test_a_plan_is_shown_and_then_carried_out(run: Path) -> None:
    shown = ckptkit("prune", run, "--keep-last", "1", "--keep-every", "2")
    assert shown.returncode == 0
    assert shown.stderr.startswith("hint: run the same command with --yes to do it")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["checkpoint", "size", "frees", "verdict", "reason"]
    assert [line.split()[0] for line in lines[1:]] == ["ckpt-10", "ckpt-2", "ckpt-1", r"\x1b[31mred", "would"]
    assert "nothing was deleted" in lines[-1]
    assert (run / "ckpt-1").is_dir()
    done = ckptkit("prune", run, "--keep-last", "1", "--keep-every", "2", "--yes")
    assert done.stdout.splitlines()[-1].startswith("deleted 1 checkpoint, ")
    assert done.stderr == ""
    assert sorted(path.name for path in run.glob("*")) == ["\x1b[31mred", "ckpt-10", "ckpt-2"]
    again = ckptkit("prune", run, "--keep-last", "1", "--keep-every", "2", "--yes")
    assert again.stdout.splitlines()[-1] == "every checkpoint stays: nothing to delete"


def test_demoting_is_shown_and_then_done(tmp_path: Path) -> None:
    for step in (1, 2):
        save_alone({"model": {"w": torch.ones(9)}, "optimizer": {"w": torch.ones(9000)}}, tmp_path / f"ckpt-{step}")
    ckptkit("pin", tmp_path / "ckpt-2")
    shown = ckptkit("prune", tmp_path, "--keep-last", "1", "--demote")
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == ["ckpt-2", "ckpt-1", "would"]
    assert "pinned" in shown.stdout
    frees = shown.stdout.partition(" and free ")[2].partition(";")[0]
    done = ckptkit("prune", tmp_path, "--keep-last", "1", "--demote", "--yes")
    assert done.stdout.splitlines()[-1] == f"demoted 1 checkpoint, {frees} freed"
    assert (tmp_path / "ckpt-1" / "model.safetensors").is_file()


def test_in_json(run: Path) -> None:
    plan = json.loads(ckptkit("prune", run, "--keep-last", "1", "--json").stdout)
    assert plan.keys() == {"keep", "delete", "demote", "other", "deleted", "freed_bytes"}
    assert (plan["deleted"], plan["freed_bytes"]) == (False, 0)
    nbytes = sum(file.stat().st_size for file in (run / "ckpt-1").iterdir())
    assert plan["delete"][1] == {
        "path": str(run / "ckpt-1"),
        "step": 1,
        "nbytes": nbytes,
        "freed_bytes": nbytes,
        "reason": "no rule keeps it",
        "deletes": [],
    }
    assert plan["other"][0]["step"] is None
    done = json.loads(ckptkit("prune", run, "--keep-last", "1", "--json", "--yes").stdout)
    assert done == {**plan, "deleted": True, "freed_bytes": sum(entry["nbytes"] for entry in plan["delete"])}


def test_errors(run: Path) -> None:
    with locked_for_deletion(run):
        occupied = ckptkit("prune", run, "--keep-last", "1", "--yes")
    for ran, code, said in (
        (ckptkit("prune", run), 2, "no rule says what to keep"),
        (ckptkit("prune", run, "--keep-every", "0"), 2, "--keep-every: expected 1 or more, found 0"),
        (ckptkit("prune", run / "absent", "--keep-last", "1"), 3, "no such directory"),
        (occupied, 5, "another process is deleting"),
    ):
        assert (ran.returncode, ran.stdout) == (code, "")
        assert ran.stderr.startswith("error: ")
        assert said in ran.stderr
    assert (run / "ckpt-1").is_dir()


def test_a_dry_run_is_the_default_and_contradicts_yes(run: Path) -> None:
    shown = ckptkit("prune", run, "--keep-last", "1", "--dry-run")
    assert (shown.returncode, shown.stdout) == (0, ckptkit("prune", run, "--keep-last", "1").stdout)
    both = ckptkit("prune", run, "--keep-last", "1", "--dry-run", "--yes")
    assert both.returncode == 2
    assert "--dry-run" in both.stderr
    assert (run / "ckpt-1").is_dir()
