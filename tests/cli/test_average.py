"""`average` as a contract: what it prints, how it refuses, and what is left when it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import ckptkit
from tests.producers import save_alone

KEYS = {"output", "format", "files", "tensors", "nbytes", "seconds", "sources", "dropped", "cast", "notes"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints of a model, each with its optimizer."""
    for step in (9, 10, 11):
        state = {"model": {"w": torch.full((4000, 300), float(step))}, "optim": {"state": {"w": {"m": torch.ones(3)}}}}
        save_alone(state, tmp_path / "run" / f"ckpt-{step}")
    return tmp_path / "run"


def test_in_json(run: Path, tmp_path: Path) -> None:
    ran = ckptkit("average", run, tmp_path / "out", "--last", 2, "--factors", "3,1", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    result = json.loads(ran.stdout)
    assert result.keys() >= KEYS | {"checked_bytes", "unchecked_bytes", "peak_rss_bytes"}
    assert [(Path(source["path"]).name, source["weight"]) for source in result["sources"]] == [
        ("ckpt-10", 0.75),
        ("ckpt-11", 0.25),
    ]
    assert result["checked_bytes"] == 2 * 4_800_000
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].unique().tolist() == [10.25]


def test_for_a_reader(run: Path, tmp_path: Path) -> None:
    ran = ckptkit("average", run / "ckpt-9", run / "ckpt-11", tmp_path / "out", "--to", "dcp", "--no-sync")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"averaged 2 checkpoints into {tmp_path / 'out'}\n")
    for words in (
        "  0.5     ",
        "ckpt-9",
        "not copied: `optim`, 1 entry",
        "checksums verified for all 9.6 MB that were read",
    ):
        assert words in ran.stdout
    ran = ckptkit("average", run, tmp_path / "new", "--last", 3, "--dry-run")
    assert ran.stdout.startswith("would average 3 checkpoints")
    assert "3 chunks to read, 4.8 MB to write" in ran.stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["{run}", "{tmp}/out"], 2, "usage"),
        (["{run}", "{tmp}/out", "--last", "9"], 2, "usage"),
        (["{run}", "{tmp}/out", "--last", "2", "--weights", "1,x"], 2, "usage"),
        (["{run}", "{tmp}/absent", "{tmp}/out"], 3, "not_a_checkpoint"),
        (["{run}", "{run}", "{run}/ckpt-9"], 5, "occupied"),
        (["{run}", "{run}/ckpt-9", "{run}/ckpt-9", "--overwrite"], 5, "unsafe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_errors(arguments: list[str], code: int, kind: str, run: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ran = ckptkit("average", *(argument.format(run=run, tmp=tmp_path) for argument in arguments), "--json")
    assert ran.returncode == code
    assert json.loads(ran.stdout)["error"]["code"] == kind
    assert sorted(tmp_path.rglob("*")) == before


def run_and_die(how: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`ckptkit` with these arguments in a process that gets a signal when it has written two blocks."""
    code = (
        "import os, signal, sys\n"
        "from ckptkit.io.local_file import LocalFile\n"
        "from ckptkit.cli import main\n"
        "write, written = LocalFile.write_at, []\n"
        "number = signal.Signals[sys.argv.pop(1)]\n"
        "def write_and_die(*arguments):\n"
        "    write(*arguments)\n"
        "    written.append(1)\n"
        "    if len(written) == 2:\n"
        "        os.kill(os.getpid(), number)\n"
        "LocalFile.write_at = write_and_die\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, how, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", 143)])
def test_what_is_killed_leaves_nothing_to_be_seen(how: str, code: int, run: Path, tmp_path: Path) -> None:
    arguments = ("average", run, tmp_path / "out", "--last", 3, "--jobs", 1)
    assert run_and_die(how, *arguments).returncode == code
    left = {path.name for path in tmp_path.iterdir()} - {"run"}
    assert all(name.startswith(".out.ckptkit.") for name in left)
    assert how == "SIGKILL" or not left
    assert ckptkit(*arguments).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].unique().tolist() == [10.0]
