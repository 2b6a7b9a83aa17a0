"""`ckptkit ls`, `pin` and `inspect` on the command line: tables that fit, JSON, hints; and what a shell completes."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch

from ckptkit.cli.inspect import format_percentage
from ckptkit.cli.output import format_age
from ckptkit.runs.retention import dump_metrics
from ckptkit.trainers.ckptkit import METRICS
from ckptkit.words import format_parameter_count
from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce
from tests.tiers import nightly_but


def on_terminal(columns: int, *arguments: object) -> list[str]:
    """The lines that a command prints on a terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "ckptkit", *map(str, arguments)]
    known = {**os.environ, "COLUMNS": str(columns)}  # readline, which pytest imports, sets 80
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=known):
        os.close(follower)
        output = b""
        try:
            while part := os.read(leader, 1 << 16):
                output += part
        except OSError:  # the other end was closed
            pass
    os.close(leader)
    return output.decode().split("\r\n")


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    """A run with many metrics, an unfinished checkpoint, a tracker, and names that are not to be trusted."""
    root = tmp_path / "run"
    for step in (5, 10, 15):
        shutil.copytree(produce(producers.fsdp2).root, root / f"global_step{step}")
        metrics = {"loss": 1 / step, "eval_loss": 2.0, "perplexity": math.nan, "grad_norm": 12345.678, "\x1b[31m": 1}
        (root / f"global_step{step}" / METRICS).write_bytes(dump_metrics(step, metrics))
    (root / "global_step15" / ".metadata").unlink()
    (root / "latest").write_text("global_step15")
    return root


def test_a_table_that_fits_its_terminal(run: Path) -> None:
    ckptkit("pin", run / "global_step5")
    for columns in (80, 100, 140):
        lines = on_terminal(columns, "ls", run)
        assert max(map(len, lines[:4])) <= columns
        assert lines[0].split()[:7] == ["checkpoint", "age", "ranks", "size", "state", "loss", "eval_loss"]
        assert [line.split()[0] for line in lines[1:4]] == ["global_step5", "global_step10", "global_step15"]
        assert lines[1].endswith("pinned")
        assert lines[2].endswith("latest")
        assert "unfinished" in lines[3]
        assert lines[3].endswith("`latest`")
        assert lines[4].startswith("3 checkpoints, ")
        assert "\x1b" not in "".join(lines)
    notes = " ".join(on_terminal(80, "ls", run)[5:])
    assert "`latest` says global_step15, which is not complete" in notes
    assert "also measured: perplexity, grad_norm" in notes
    assert f"`ckptkit verify {run / 'global_step15'}`" in notes
    assert ckptkit("ls", run, "-q").stderr == ""


def test_names_in_tables_break_only_after_dots_and_numbers_never(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{part}.weight" for i in (0, 11) for part in ("self_attn.q_proj", "post_attention_norm")]
    names += [f"optim.state.{name}.exp_avg_sq" for name in names]
    producers.save_alone({name: torch.ones(3) for name in names}, tmp_path / "ckpt-5")
    pieces = {piece for name in names for piece in re.findall(r"[^.]+\.?", name)}
    for view in ("--tensors", "--chunks"):
        lines = on_terminal(72, "inspect", tmp_path / "ckpt-5", view)
        start = next(i for i, line in enumerate(lines) if "tensor" in line.split())
        assert max(map(len, lines[start:])) <= 72
        words = [word for line in lines[start + 1 :] for word in line.split() if "_" in word or "." in word]
        assert {piece for word in words for piece in re.findall(r"[^.]+\.?", word)} <= pieces | {"__0_0.", "distcp"}
        piped = ckptkit("inspect", tmp_path / "ckpt-5", view).stdout
        assert all(name in piped for name in names)


def test_ls_in_json(run: Path) -> None:
    found = json.loads(ckptkit("ls", run, "--json").stdout)
    assert found.keys() == {"root", "latest", "tracker", "checkpoints"}
    assert (found["root"], found["latest"]) == (str(run), str(run / "global_step10"))
    assert [one["latest"] for one in found["checkpoints"]] == [False, True, False]
    last = found["checkpoints"][2]
    assert last.pop("saved_at") == pytest.approx(time.time(), abs=3600)
    assert last == {
        "path": str(run / "global_step15"),
        "step": 15,
        "complete": False,
        "world_size": 3,
        "nbytes": sum(file.stat().st_size for file in (run / "global_step15").iterdir()),
        "metrics": {"loss": 1 / 15, "eval_loss": 2.0, "perplexity": None, "grad_norm": 12345.678, "\x1b[31m": 1.0},
        "pinned": False,
        "format": "dcp",
        "trainer": None,
        "latest": False,
        "problem": "unfinished",
        "weights_only": False,
        "named_by": ["latest"],
        "claim": None,
        "sizes_compared": False,
    }


def test_one_checkpoint_and_none(run: Path, tmp_path: Path) -> None:
    one = ckptkit("ls", run / "global_step5")
    assert [line.split()[0] for line in one.stdout.splitlines()] == ["checkpoint", "global_step5", "1"]
    assert f"`ckptkit inspect {run / 'global_step5'}`" in one.stderr
    none = ckptkit("ls", tmp_path / "absent")
    assert (none.returncode, none.stdout) == (3, "")
    assert none.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "119 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_ages_are_short(seconds: float, said: str) -> None:
    assert format_age(seconds) == said


def test_pins_on_the_command_line(run: Path) -> None:
    pinned = ckptkit("pin", run / "global_step5", run / "global_step10", "--json")
    assert json.loads(pinned.stdout) == {"pinned": [str(run / "global_step5"), str(run / "global_step10")]}
    assert ckptkit("unpin", run / "global_step5").stdout == f"unpinned {run / 'global_step5'}\n"
    assert "nothing was pinned here; `ckptkit ls RUN` shows" in ckptkit("unpin", run / "global_step5").stderr
    refused = ckptkit("pin", run / "global_step15")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "no complete checkpoint" in refused.stderr
    assert f"`ckptkit verify {run / 'global_step15'}`" in refused.stderr


def test_inspect_at_a_glance(run: Path) -> None:
    warning, *lines = on_terminal(80, "inspect", run)
    assert warning.endswith("`latest` names global_step15, which is not complete; using global_step10")
    assert max(map(len, lines[1:])) <= max(80, len(lines[1]))
    text = "\n".join(lines)
    for words in (
        f"using {run / 'global_step10'}, the latest complete checkpoint of {run}",
        f"{run / 'global_step10'}: dcp checkpoint, step 10, written by 3 ranks",
        "trainer: torch.distributed.checkpoint",
        "no manifest",
        "parameters, ",
    ):
        assert words in text
    assert [line.split()[0] for line in lines[-5:-2]] == ["model", "optimizer", "other"]
    found = json.loads(ckptkit("inspect", run, "--json").stdout)
    assert found["trainer"] == found["producer"] == "torch.distributed.checkpoint"
    assert found["groups"]["model"].keys() == {"entries", "nbytes", "dtypes"}
    assert (found["ties"], found["has_manifest"], found["world_size"]) == ([], False, 3)
    assert found["parameters"] > 0


def test_large_and_small_numbers_read_well() -> None:
    numbers = (1, 2, 108_864, 3_030_000, 8_030_261_248, 1.5e12)
    assert [format_parameter_count(int(number)) for number in numbers] == [
        *("1 parameter", "2 parameters", "108,864 parameters", "3.03 million parameters", "8.03 billion parameters"),
        "1.5 trillion parameters",
    ]
    assert [format_percentage(part) for part in (1.0, 0.9999, 0.5, 0.001, 0.0)] == ["100%", ">99%", "50%", "<1%", "0%"]


PATHS = ("inspect", "ls", "verify", "prune", "pin", "unpin", "consolidate", "convert", "reshard", "diff", "stats")


def complete(**environment: str) -> list[str]:
    """What the installed command offers to a shell."""
    code = "import sys; sys.argv[0] = 'ckptkit'; from ckptkit.cli import main; main()"
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    ).stdout.split()


@pytest.mark.parametrize("command", nightly_but(["inspect", "prune"], PATHS))
def test_a_shell_completes_paths_where_paths_are_asked_for(command: str) -> None:
    """Bash completes files by itself where we offer nothing (`-o default`), and zsh is told to."""
    bash = complete(COMP_WORDS=f"ckptkit {command} ru", COMP_CWORD="2", _CKPTKIT_COMPLETE="complete_bash")
    zsh = complete(_TYPER_COMPLETE_ARGS=f"ckptkit {command} ru", _CKPTKIT_COMPLETE="complete_zsh")
    assert (bash, zsh) == ([], ["_files"])


def test_a_shell_completes_commands_and_options() -> None:
    assert complete(COMP_WORDS="ckptkit pru", COMP_CWORD="1", _CKPTKIT_COMPLETE="complete_bash") == ["prune"]
    offered = complete(COMP_WORDS="ckptkit prune --keep", COMP_CWORD="2", _CKPTKIT_COMPLETE="complete_bash")
    assert offered == ["--keep-last", "--keep-every", "--keep-best"]
    command = [sys.executable, "-m", "ckptkit", "--show-completion", "bash"]
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # a suite may run under no shell
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=named).stdout
    assert "complete -o default -F" in shown
