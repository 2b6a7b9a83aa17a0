"""`ckptkit watch` on the command line: its lines, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.command import ckptkit
from tests.producers import save_alone


def watch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return ckptkit("watch", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_alone({"model": {"w": torch.ones(9)}}, tmp_path / "my run" / f"ckpt-{step}")
    return tmp_path / "my run"


def test_a_line_for_each(run: Path) -> None:
    first = watch(run, "--do", "consolidate {ckpt} {out}", "--every", "0.05", "--once")
    assert first.returncode == 0
    assert first.stdout.splitlines() == ["ckpt-1: handled", "ckpt-2: handled", "handled 2 checkpoints"]
    assert "ckpt-1: consolidate {ckpt} {out}" in first.stderr
    assert "consolidated " in first.stderr  # what the commands print is not ours
    again = watch(run, "--do", "consolidate {ckpt} {out}", "--every", "0.05", "--once")
    assert again.stdout.splitlines() == ["handled 0 checkpoints, 2 handled before"]


def test_in_json(run: Path) -> None:
    done = watch(run, "--exec", "test {step} = 2", "--every", "0.05", "--tries", "1", "--once", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["ok"], found["missed"], found["before"]) == (False, [], [])
    assert (found["handled"], found["failed"]) == ([str(run / "ckpt-2")], [str(run / "ckpt-1")])
    assert found["reasons"] == {str(run / "ckpt-1"): "given up after 1 try: test {step} = 2: exit code 1"}


@pytest.mark.slow
def test_a_command_that_hangs_is_said_with_its_limit(run: Path) -> None:
    given = ("--every", "0.05", "--tries", "1", "--timeout", "0.5", "--once")
    done = watch(run, "--exec", "sleep 1000", *given, "--json")
    assert done.returncode == 1
    words = "given up after 1 try: sleep 1000: ran longer than 0.5 s, the timeout, and was ended with its children"
    assert set(json.loads(done.stdout)["reasons"].values()) == {words}
    assert f"ckpt-1: {words}\n" in watch(run, "--exec", "sleep 1000", *given).stdout
    refused = watch(run, "--exec", "true", "--timeout", "0", "--once")
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--do", "consolidat {ckpt} {out}"),
            "error: unknown command `consolidat`\nhint: there is `consolidate`\n",
        ),
        ((), "error: no command to run was passed\n"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Path, arguments: tuple[str, ...], message: str) -> None:
    done = watch(run, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_json_is_of_what_has_an_end(run: Path) -> None:
    done = watch(run, "--exec", "true", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["hint"] == "add --once"
