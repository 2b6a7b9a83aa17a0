"""The command line as a contract: exit codes, JSON on stdout, notes on stderr, help that helps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.cli.commands import COMMANDS
from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce


@pytest.fixture
def source(produce: Produce) -> Path:
    return produce(producers.fsdp2).root


def test_consolidate_in_json(source: Path, tmp_path: Path) -> None:
    ran = ckptkit("consolidate", source, tmp_path / "out", "--json")
    assert ran.returncode == 0
    result = json.loads(ran.stdout)
    assert result.keys() >= {
        *("output", "format", "files", "tensors", "nbytes", "seconds", "peak_rss_bytes"),
        *("checked_bytes", "renamed", "dropped", "cast"),
    }
    assert result["output"] == str(tmp_path / "out")
    assert result["checked_bytes"] == result["nbytes"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_peak_memory_is_not_that_of_the_parent(source: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "held = b'x' * (1 << 29)\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "else:\n"
        "    del held\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    command = [sys.executable, "-c", code, "-m", "ckptkit", "consolidate", str(source), str(tmp_path / "out"), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["peak_rss_bytes"] < 1 << 28


def test_a_dry_run_in_json(source: Path, tmp_path: Path) -> None:
    result = json.loads(ckptkit("consolidate", source, tmp_path / "out", "--dry-run", "--json").stdout)
    assert result.keys() >= {"copies", "free_bytes", "files"}
    assert list(tmp_path.iterdir()) == []


def test_consolidate_for_a_reader(source: Path, tmp_path: Path) -> None:
    ran = ckptkit("consolidate", source, tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "512B")
    assert ran.returncode == 0
    for words in (
        "not copied: `optim`",
        "float32 => bfloat16",
        "model.safetensors.index.json",
        "checksums verified",
        "peak memory",
    ):
        assert words in ran.stdout
    assert ran.stderr.startswith("warning: no config.json found")


def test_the_latest_of_a_run_is_said(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "run" / "ckpt-3")
    ran = ckptkit("consolidate", tmp_path / "run", tmp_path / "out")
    assert "ckpt-3" in ran.stderr
    assert ckptkit("consolidate", tmp_path / "run", tmp_path / "quiet", "-q").stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        ["consolidate", "{source}", "{tmp}/out"],
        ["reshard", "{source}", "{tmp}/out", "--to", "2"],
        ["inspect", "{source}", "--tensors", "--shards"],
        ["verify", "{source}"],
        ["diff", "{source}", "{source}"],
        ["ls", "{source}/.."],
        ["estimate", "tiny", "--world-size", "2"],
    ],
    ids=lambda command: command[0],
)
def test_quiet_prints_nothing(command: list[str], source: Path, tmp_path: Path) -> None:
    ran = ckptkit(*(word.format(source=source, tmp=tmp_path) for word in command), "--quiet")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_quiet_prints_errors_problems_and_json(source: Path, tmp_path: Path) -> None:
    assert ckptkit("inspect", tmp_path, "-q").stderr.startswith("error: ")
    assert json.loads(ckptkit("inspect", source, "-q", "--json").stdout)["format"] == "dcp"
    copy = shutil.copytree(source, tmp_path / "copy")
    min(copy.glob("*.distcp")).unlink()
    ran = ckptkit("verify", copy, "-q")
    assert ran.returncode == 1
    assert all(line.startswith(("problem: ", "  hint: ")) for line in ran.stdout.splitlines())
    assert ran.stdout


def test_a_path_that_does_not_exist_has_a_hint(tmp_path: Path) -> None:
    for name in ("ckpt-200", "ckpt-400", "tokens", ".ckpt-4000.tmp"):
        (tmp_path / "run" / name).mkdir(parents=True)
    typed = tmp_path / "run" / "ckpt-4000"
    for command in (["inspect"], ["ls"], ["pin"], ["verify"], ["consolidate", "--dry-run", tmp_path / "out"]):
        ran = ckptkit(command[0], typed, *command[1:])
        assert ran.returncode != 0
        assert f"did you mean `{tmp_path}/run/ckpt-400`" in ran.stdout + ran.stderr
    assert "did you mean" not in ckptkit("inspect", tmp_path / "run" / "weights").stderr
    assert "did you mean" not in ckptkit("inspect", tmp_path / "none" / "weights").stderr


def test_inspect(source: Path) -> None:
    result = json.loads(ckptkit("inspect", source, "--json", "--chunks").stdout)
    assert result["format"] == "dcp"
    assert result["world_size"] == 3
    tensor = next(tensor for tensor in result["tensors"] if tensor["name"] == "model.embed.weight")
    assert (tensor["dtype"], tensor["shape"], tensor["nbytes"]) == ("float32", [11, 6], 264)
    assert sorted(chunk["start"] for chunk in tensor["chunks"]) == [[0, 0], [4, 0], [8, 0]]
    assert {blob["name"] for blob in result["blobs"]} >= {"extra.steps"} or result["blobs"]
    shown = ckptkit("inspect", source, "--tensors").stdout
    assert "model.embed.weight" in shown
    assert "written by 3 ranks" in shown


def test_inspect_says_whose_names_a_model_has(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 3)}, tmp_path / "model.safetensors")
    assert "names: transformers" in ckptkit("inspect", tmp_path).stdout.splitlines()


def test_a_chunks_offset_is_where_its_bytes_are(source: Path, produce: Produce) -> None:
    result = json.loads(ckptkit("inspect", source, "--json", "--chunks").stdout)
    truth = produce(producers.fsdp2).truth
    for tensor in result["tensors"]:
        for chunk in tensor["chunks"]:
            box = tuple(slice(a, a + n) for a, n in zip(chunk["start"], chunk["size"], strict=True))
            expected = truth[tensor["name"]][box].contiguous().numpy().tobytes()
            with (source / chunk["file"]).open("rb") as file:
                file.seek(chunk["offset"])
                assert file.read(len(expected)) == expected


def test_names_cannot_move_the_cursor(produce: Produce) -> None:
    shown = ckptkit("inspect", produce(producers.strange_names).root, "--tensors")
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
    assert r"\x1b[31mred" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["inspect", "{tmp}/absent"], 3, "not_a_checkpoint"),
        (["inspect", "{tmp}"], 3, "not_a_checkpoint"),
        (["consolidate", "{source}", "{source}/training"], 5, "unsafe"),
        (["consolidate", "{source}", "{source}"], 5, "unsafe"),
        (["consolidate", "{source}", "{source}", "--overwrite"], 5, "unsafe"),
        (["consolidate", "{source}", "{tmp}/out", "--dtype", "float7"], 2, "usage"),
        (["consolidate", "{source}", "{tmp}/out", "--max-shard-size", "many"], 2, "usage"),
        (["consolidate", "{source}", "{tmp}/out", "--base", "no/such/base"], 2, "usage"),
        (["consolidate", "{source}", "/etc/hostname/out"], 4, "io"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_errors(arguments: list[str], code: int, kind: str, source: Path, tmp_path: Path) -> None:
    given = [argument.format(source=source, tmp=tmp_path) for argument in arguments]
    before = sorted(source.rglob("*"))
    ran = ckptkit(*given)
    assert ran.returncode == code
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    told = ckptkit(*given, "--json")
    assert told.returncode == code
    error = json.loads(told.stdout)["error"]
    assert error.keys() == {"code", "message", "path", "tensor", "offset", "hint"}
    assert error["code"] == kind
    assert sorted(source.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert a b --to foo", "--to: expected `dcp`, `torch_checkpointing`, `hf`, "),
        ("convert a", "missing argument"),
        ("merge a b", "missing argument: expected BASE ADAPTER... OUT"),
        ("average", "missing argument: expected SRC... OUT"),
        ("apply", "missing argument: expected BASE DELTA... OUT"),
        ("convert a b", "--to: expected dcp, torch_checkpointing, hf, "),
        ("convert a b --to hf --jobs x", "--jobs: expected a whole number, found `x`"),
        ("convert a b --to hf --jobs 0", "--jobs: expected 1 or more, found `0`"),
        ("consolidate a b --dtype", "--dtype: expected a value, found none"),
        ("inspect a --nonsense", "no such option: --nonsense"),
        ("inspekt a", "no such command `inspekt`"),
        ("consolidate a b --max-shard-size many", "expected a size, found `many`"),
    ],
)
def test_usage_errors(command: str, words: str) -> None:
    verb, *rest = command.split()
    ran = ckptkit(verb, *rest)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")
    assert [line.partition(":")[0] for line in ran.stderr.splitlines()] == ["error", "hint"]
    told = ckptkit(verb, "--json", *rest)
    error = json.loads(told.stdout)["error"]
    assert (told.returncode, told.stderr, error["code"]) == (2, "", "usage")
    assert words in error["message"]
    assert f"error: {error['message']}\n" in ran.stderr
    assert "Value error" not in error["message"]


def test_help_is_printed_where_there_is_no_command() -> None:
    ran = ckptkit()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("Usage: ")


def test_the_help_groups_the_commands_and_shows_each_whole_summary_on_one_line() -> None:
    lines = ckptkit("--help", env={**os.environ, "COLUMNS": "80"}).stdout.splitlines()
    for heading in {known.heading for known in COMMANDS.values()}:
        group = [name for name, known in COMMANDS.items() if known.heading == heading]
        start = lines.index(f"{heading}:") + 1
        shown = dict(line.split(maxsplit=1) for line in lines[start : start + len(group)])
        assert list(shown) == group
        assert all(summary.endswith(".") and "..." not in summary for summary in shown.values()), shown
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    """Stopped while it copies."""
    import torch

    from tests.producers import save_alone

    save_alone({"model": {f"w{i}": torch.zeros(1 << 20) for i in range(64)}}, tmp_path / "ckpt")
    command = [
        sys.executable,
        "-m",
        "ckptkit",
        "consolidate",
        str(tmp_path / "ckpt"),
        str(tmp_path / "out"),
        "--jobs",
        "1",
    ]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        for _ in range(20):  # now and then it is done before the signal arrives
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while running.poll() is None and not (tmp_path / ".out.ckptkit.tmp").exists():
                os.sched_yield()
            running.send_signal(number)
            _, said = running.communicate(timeout=60)
            if said == "interrupted\n":
                break
            for left in ("out", ".out.ckptkit.tmp"):  # when a part of it was done, that is kept
                shutil.rmtree(tmp_path / left, ignore_errors=True)
        assert running.returncode == code
        assert said == "interrupted\n"
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_an_interruption_that_nobody_could_catch_comes_again() -> None:
    code = """
import signal, time
from ckptkit import cli
from ckptkit.cli import commands

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def work(**_options):
    Last()
    time.sleep(30)

commands.app = work
cli.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
